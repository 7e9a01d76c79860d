"""What a function that is computed piece by piece, and again, may contain: the one list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

# The only place that knows which operations have state; the TensorFlow version is pinned to 2.21.
from tensorflow.python.framework import op_def_registry

from pipemesh.errors import PipelineError

# They check or tell, and change nothing.
EFFECTS = frozenset(
    (
        *("Assert", "CheckNumerics", "CheckNumericsV2"),
        # lingvo's own.
        *("AssertShapeMatch", "AssertSameDim0"),
        *("Print", "PrintV2"),
        *("WriteSummary", "WriteScalarSummary", "WriteHistogramSummary"),
        *("WriteImageSummary", "WriteAudioSummary", "WriteRawProtoSummary"),
    )
)
# They have state as far as TensorFlow knows, but give the same whenever they are computed.
_READS = frozenset(
    (
        *("VarHandleOp", "ReadVariableOp", "VariableShape", "VarIsInitializedOp"),
        *("ResourceGather", "ResourceGatherNd", "VariableV2", "Variable"),
        *("Empty", "StatelessRandomGetAlg"),
        *("LookupTableFind", "LookupTableFindV2", "LookupTableSize", "LookupTableSizeV2"),
    )
)
# Their functions are looked into themselves.
_CALLS = frozenset(("Case", "If", "PartitionedCall", "StatefulPartitionedCall", "While"))
_WRITES = ("Assign", "ResourceScatter", "ResourceApply", "Scatter", "ResourceStridedSliceAssign")


class Bodies:
    """A graph's nodes and the functions that they call.

    Args:
        graph_def: of the graph.
    """

    def __init__(self, graph_def: Any) -> None:
        self._functions: Mapping[str, Sequence[Any]] = {
            f.signature.name: f.node_def for f in graph_def.library.function
        }

    def called(self, node: Any) -> list[str]:
        """Names of the functions that a node calls."""
        values = node.attr.values()
        names = [f.name for value in values for f in (value.func, *value.list.func)]
        # A node may also be the call of a function of its own name.
        return [name for name in [*names, node.op] if name in self._functions]

    def within(self, nodes: Sequence[Any]) -> Iterator[Any]:
        """The nodes, and those of all functions that they call, each function once."""
        seen: set[str] = set()
        todo: list[Sequence[Any]] = [nodes]
        while todo:
            for node in todo.pop():
                yield node
                for name in self.called(node):
                    if name not in seen:
                        seen.add(name)
                        todo.append(self._functions[name])

    def has_effect(self, node: Any) -> bool:
        """Whether a node checks or tells something, or calls a function that does."""
        return any(inner.op in EFFECTS for inner in self.within([node]))


def has_effects(graph_def: Any) -> bool:
    """Whether anything in a graph, or in a function that it calls, checks or tells something."""
    return any(node.op in EFFECTS for node in Bodies(graph_def).within(graph_def.node))


def is_stateful(op: str) -> bool:
    """Whether TensorFlow says that operations of a type have state."""
    definition = op_def_registry.get(op)
    return definition is not None and definition.is_stateful


def check_pure(graph_def: Any, what: str, why: str, effects: bool = True) -> None:
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
    checks = frozenset(op for op in EFFECTS if op.startswith(("Assert", "CheckNumerics")))
    allowed = _READS | _CALLS | (EFFECTS if effects else checks)
    for node in Bodies(graph_def).within(graph_def.node):
        if node.op not in allowed and is_stateful(node.op):
            raise PipelineError(
                f"{what} contains {node.name!r}, a {node.op} operation, which has side effects or "
                f"state; {why}. {_advice(node.op)}"
            )


def _advice(op: str) -> str:
    if op in ("PyFunc", "EagerPyFunc"):
        return "For Python functions there is tf.numpy_function(..., stateful=False)"
    if op.startswith(_WRITES):
        return (
            "What layers count or average belongs into accumulators "
            "(base_layer.Accumulator, as in lingvo's BatchNormLayerNoPadding), and the variable "
            "is updated after the step"
        )
    if "Random" in op or op in ("Multinomial", "TruncatedNormal"):
        return (
            "For random numbers use tf.random.stateless_* with a seed from the state or the "
            "inputs, or enter pipemesh.randomness.plan_free_randomness(step) around it"
        )
    return "Compute it outside and pass the result in"
