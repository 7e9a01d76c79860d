"""Kinds of operations, and the check that a function has no side effects or state."""

from __future__ import annotations

import tensorflow as tf

# The only place that knows which operations have state; the TensorFlow version is pinned to 2.21.
from tensorflow.python.framework import op_def_registry

from pipemesh.backend.graphs import Bodies
from pipemesh.errors import PipelineError

# They check, and change nothing. The last two are lingvo's own.
CHECKS = frozenset(
    ("Assert", "CheckNumerics", "CheckNumericsV2", "AssertShapeMatch", "AssertSameDim0")
)
# Checks that hand on what they check.
CHECK_AND_HAND_ON = frozenset(("CheckNumerics", "CheckNumericsV2"))
# They tell, and change nothing.
TELLS = frozenset(
    (
        *("Print", "PrintV2"),
        *("WriteSummary", "WriteScalarSummary", "WriteHistogramSummary"),
        *("WriteImageSummary", "WriteAudioSummary", "WriteRawProtoSummary"),
    )
)
EFFECTS = CHECKS | TELLS
# Summaries of TF1 graphs, which somebody else writes.
SUMMARIES = frozenset(
    ("AudioSummaryV2", "HistogramSummary", "ImageSummary", "ScalarSummary", "TensorSummaryV2")
)

# TF1's variables that are no resources, whose tensors are references.
REF_VARIABLES = frozenset(("VariableV2", "Variable"))
VARIABLES = REF_VARIABLES | {"VarHandleOp"}
# They have state as far as TensorFlow knows, but give the same whenever they are computed.
READS = VARIABLES | frozenset(
    (
        *("ReadVariableOp", "VariableShape", "VarIsInitializedOp"),
        *("ResourceGather", "ResourceGatherNd", "Empty", "StatelessRandomGetAlg"),
        *("LookupTableFindV2", "LookupTableSizeV2", "AllCandidateSampler"),
    )
)
# Their names begin like this.
WRITES = ("Assign", "ResourceScatter", "ResourceApply", "Scatter", "ResourceStridedSliceAssign")

# They meet those of their group, by a name that they share, and change nothing else.
COLLECTIVES = frozenset(("NcclAllReduce",))
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))

# They hand on what they are given.
IDENTITIES = frozenset(("Identity", "IdentityN"))
# They give a tensor another shape; the memory is the same.
RESHAPES = frozenset(("Reshape", "ExpandDims", "Squeeze"))
# There is no gradient beyond them.
WITHOUT_GRADIENT = frozenset(("Const", "StopGradient"))

DRAWS_WITH_STATE = frozenset(
    """
    Multinomial ParameterizedTruncatedNormal RandomGamma RandomPoisson RandomPoissonV2 RandomShuffle
    RandomStandardNormal RandomUniform RandomUniformInt TruncatedNormal UniformCandidateSampler
    LogUniformCandidateSampler FixedUnigramCandidateSampler LearnedUnigramCandidateSampler
    ThreadUnsafeUnigramCandidateSampler
    """.split()
)
DRAWS_WITHOUT_STATE = frozenset(
    """
    StatelessMultinomial StatelessParameterizedTruncatedNormal StatelessRandomBinomial
    StatelessRandomGammaV2 StatelessRandomGammaV3 StatelessRandomNormal StatelessRandomNormalV2
    StatelessRandomPoisson StatelessRandomUniform StatelessRandomUniformFullInt
    StatelessRandomUniformFullIntV2 StatelessRandomUniformInt StatelessRandomUniformIntV2
    StatelessRandomUniformV2 StatelessShuffle StatelessTruncatedNormal StatelessTruncatedNormalV2
    """.split()
)


# Their functions are looked into themselves.
_LOOKED_INTO = CALLS | BRANCHES | LOOPS


def has_effect(node: tf.compat.v1.NodeDef, bodies: Bodies) -> bool:
    """Whether a node checks or tells something, or calls a function that does.

    Args:
        node: of a graph that is written down.
        bodies: the functions of the graph.
    """
    return any(inner.op in EFFECTS for inner in bodies.within([node]))


def has_effects(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Whether anything in a graph, or in a function that it calls, checks or tells something."""
    return any(node.op in EFFECTS for node in Bodies(graph_def).within(graph_def.node))


def is_stateful(op: str) -> bool:
    """Whether TensorFlow says that operations of a type have state."""
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


def check_pure(graph_def: tf.compat.v1.GraphDef, what: str, why: str, effects: bool = True) -> None:
    """Checks that nothing in a graph, or in a function that it calls, has side effects or state.

    Everything is looked at, used or not: what nobody uses would silently not happen.

    Args:
        graph_def: of the graph.
        what: names it in errors.
        why: what would go wrong with state.
        effects: whether prints and summaries are allowed; assertions always are.

    Raises:
        PipelineError: something has.
    """
    allowed = READS | _LOOKED_INTO | (EFFECTS if effects else CHECKS)
    # Those in functions cannot be given a name of their own each time.
    meeting = {node.name for node in graph_def.node if node.op in COLLECTIVES}
    for node in Bodies(graph_def).within(graph_def.node):
        if node.op not in allowed and node.name not in meeting and is_stateful(node.op):
            raise PipelineError(
                f"{what} contains {node.name!r}, a {node.op} operation, which has side effects or "
                f"state; {why}. {_advice(node.op)}"
            )


def _advice(op: str) -> str:
    if op in ("PyFunc", "EagerPyFunc"):
        return "For Python functions there is tf.numpy_function(..., stateful=False)"
    if op.startswith(WRITES):
        return (
            "What layers count or average belongs into accumulators "
            "(base_layer.Accumulator, as in lingvo's BatchNormLayerNoPadding), and the variable "
            "is updated after the step"
        )
    if "Random" in op or op in DRAWS_WITH_STATE:
        return (
            "For random numbers use tf.random.stateless_* with a seed from the state or the "
            "inputs, or enter pipemesh.randomness.plan_free_randomness(step) around it"
        )
    return "Compute it outside and pass the result in"
