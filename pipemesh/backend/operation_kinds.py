"""Kinds of operations, and the check that a function has no side effects or state."""

from __future__ import annotations

import tensorflow as tf

# Only this registry knows which operations are stateful; the TensorFlow version is pinned to 2.21.
from tensorflow.python.framework import op_def_registry

from pipemesh.backend.graphs import Bodies
from pipemesh.errors import PipelineError

# Operations that check, and change nothing; the last two are lingvo's own.
CHECKS = frozenset(
    ("Assert", "CheckNumerics", "CheckNumericsV2", "AssertShapeMatch", "AssertSameDim0")
)
# Checks that return their input.
CHECK_AND_HAND_ON = frozenset(("CheckNumerics", "CheckNumericsV2"))
# Operations that print or summarize, and change nothing.
TELLS = frozenset(
    (
        *("Print", "PrintV2"),
        *("WriteSummary", "WriteScalarSummary", "WriteHistogramSummary"),
        *("WriteImageSummary", "WriteAudioSummary", "WriteRawProtoSummary"),
    )
)
EFFECTS = CHECKS | TELLS
# Summaries of TF1 graphs, which another operation writes.
SUMMARIES = frozenset(
    ("AudioSummaryV2", "HistogramSummary", "ImageSummary", "ScalarSummary", "TensorSummaryV2")
)

# TF1's reference variables.
REF_VARIABLES = frozenset(("VariableV2", "Variable"))
VARIABLES = REF_VARIABLES | {"VarHandleOp"}
# Stateful as TensorFlow declares them, but with the same result whenever they are computed.
READS = VARIABLES | frozenset(
    (
        *("ReadVariableOp", "VariableShape", "VarIsInitializedOp"),
        *("ResourceGather", "ResourceGatherNd", "Empty", "StatelessRandomGetAlg"),
        *("LookupTableFindV2", "LookupTableSizeV2", "AllCandidateSampler"),
    )
)
# Prefixes of their names.
WRITES = ("Assign", "ResourceScatter", "ResourceApply", "Scatter", "ResourceStridedSliceAssign")

# They exchange tensors with operations of the same shared name, and change nothing else.
COLLECTIVES = frozenset(("NcclAllReduce",))
CALLS = frozenset(("PartitionedCall", "StatefulPartitionedCall"))
BRANCHES = frozenset(("If", "StatelessIf", "Case", "StatelessCase"))
LOOPS = frozenset(("While", "StatelessWhile"))
# They run functions, which may have operations without an input.
RUN_FUNCTIONS = CALLS | BRANCHES | LOOPS

# They return their inputs.
IDENTITIES = frozenset(("Identity", "IdentityN"))
# They change the shape of a tensor, not its memory.
RESHAPES = frozenset(("Reshape", "ExpandDims", "Squeeze"))
# They end the gradient.
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


def has_effect(node: tf.compat.v1.NodeDef, bodies: Bodies) -> bool:
    """Returns whether a node checks or prints something, or calls a function that does."""
    return any(inner.op in EFFECTS for inner in bodies.within([node]))


def has_effects(graph_def: tf.compat.v1.GraphDef) -> bool:
    """Returns whether anything in a graph, or in a function that it calls, checks or prints."""
    return any(node.op in EFFECTS for node in Bodies(graph_def).within(graph_def.node))


def is_stateful(op: str) -> bool:
    """Returns whether TensorFlow declares operations of a type as stateful."""
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


def check_pure(graph_def: tf.compat.v1.GraphDef, what: str, why: str, effects: bool = True) -> None:
    """Checks that neither a graph nor the functions that it calls have side effects or state."""
    # Unused nodes count, too: their effects would silently be lost. Checks are always allowed,
    # prints and summaries only with `effects`.
    allowed = READS | RUN_FUNCTIONS | (EFFECTS if effects else CHECKS)
    # A collective in a function cannot get a unique name for each call.
    top_level = {node.name for node in graph_def.node if node.op in COLLECTIVES}
    for node in Bodies(graph_def).within(graph_def.node):
        if node.op not in allowed and node.name not in top_level and is_stateful(node.op):
            raise PipelineError(
                f"{what} contains {node.name!r}, a {node.op} operation, which has side effects or "
                f"state; {why}. {_advice(node.op)}"
            )


def _advice(op: str) -> str:
    if op in ("PyFunc", "EagerPyFunc"):
        return "For Python functions there is tf.numpy_function(..., stateful=False)"
    if op.startswith(WRITES):
        return (
            "Keep counts and averages in accumulators (base_layer.Accumulator, as in lingvo's "
            "BatchNormLayerNoPadding), and update the variable after the step"
        )
    if "Random" in op or op in DRAWS_WITH_STATE:
        return (
            "For random numbers use tf.random.stateless_* with a seed from the state or the "
            "inputs, or enter pipemesh.randomness.plan_free_randomness(step) around it"
        )
    return "Compute it outside and pass the result in"
