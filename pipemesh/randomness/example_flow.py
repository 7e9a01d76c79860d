"""Follows the examples of a batch through a graph.

A random tensor in one of whose dims others are folded into the batch (`[batch * heads, ...]`) does
not say whether the examples come first. What it meets does: a mask is multiplied with activations,
and each of these comes, by way of reshapes and products, from one example of the stage's inputs. So
each order is tried: under a wrong one, numbers of one example would meet activations of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from pipemesh.backend.graphs import called_functions
from pipemesh.backend.operation_kinds import BRANCHES, CALLS, LOOPS
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.randomness.example_labels import (
    NO_EXAMPLES,
    SEVERAL,
    Label,
    UnknownLabelError,
    along,
    apply_rule,
    compressed,
    joined,
    of_rank,
)
from pipemesh.randomness.scope import WholeDraw, WholeDraws

_KNOWN = CALLS | BRANCHES | LOOPS
# The most passes through a loop's body until the labels of its state stay the same.
_TURNS = 5


class ConflictError(Exception):
    """Elements of different examples meet."""


@dataclasses.dataclass
class _Flow:
    """The labels of a graph's tensors, and the flows of the functions that its operations call."""

    labels: dict[str, Label | None] = dataclasses.field(default_factory=dict)
    inner: dict[str, list[_Flow]] = dataclasses.field(default_factory=dict)


class _Node(NamedTuple):
    """An operation as Python objects, which take longer to create than to read."""

    operation: tf.Operation
    # Names.
    inputs: tuple[str, ...]
    outputs: list[tf.Tensor]
    # The graphs of the functions that it calls, if they can be followed.
    functions: list[tf.Graph]
    # The identities of these graphs and of all that they call.
    graphs: frozenset[int]


class _Nodes:
    """The operations of graphs without their inputs, created once."""

    def __init__(self) -> None:
        self._by_graph: dict[int, list[_Node]] = {}

    def __call__(self, graph: tf.Graph) -> list[_Node]:
        if id(graph) not in self._by_graph:
            inputs = {tensor.op.name for tensor in graph.inputs}
            operations = [op for op in graph.get_operations() if op.name not in inputs]
            self._by_graph[id(graph)] = [self._node(graph, operation) for operation in operations]
        return self._by_graph[id(graph)]

    def _node(self, graph: tf.Graph, operation: tf.Operation) -> _Node:
        known = operation.type in _KNOWN
        functions = list(called_functions(graph, operation)) if known else []
        graphs: set[int] = set()
        for function in functions:
            graphs.add(id(function))
            graphs.update(*(node.graphs for node in self(function)))
        names = tuple(tensor.name for tensor in operation.inputs)
        return _Node(operation, names, list(operation.outputs), functions, frozenset(graphs))


class ExampleFlow:
    """The labels of all tensors of a graph, from labels of its inputs (None if unknown)."""

    def __init__(self, graph: tf.Graph, inputs: Sequence[Label | None]) -> None:
        self._graph = graph
        self._inputs = list(inputs)
        self._flow = _Flow()
        self._nodes = _Nodes()
        _Follow([], self._nodes).run(graph, self._inputs, self._flow, None)

    def label(self, tensor: tf.Tensor) -> Label | None:
        """Returns the label of a tensor of the graph."""
        return self._flow.labels[tensor.name]

    def obstacle(self, supposed: Sequence[tuple[tf.Tensor, Label]]) -> str | None:
        """Returns the type of the first operation behind them whose result is unknown."""
        follow = _Follow(supposed, self._nodes)
        follow.run(self._graph, self._inputs, _Flow(), self._flow)
        return follow.unknown

    def fits(self, supposed: Sequence[tuple[tf.Tensor, Label]]) -> bool:
        """Returns whether these tensors, supposedly labelled so, meet no other example."""
        try:
            _Follow(supposed, self._nodes).run(self._graph, self._inputs, _Flow(), self._flow)
        except ConflictError:
            return False
        return True


class _Follow:
    """One pass through a graph, operation by operation, with supposed labels of some tensors."""

    def __init__(self, supposed: Sequence[tuple[tf.Tensor, Label]], nodes: _Nodes) -> None:
        self._nodes = nodes
        self._supposed: dict[int, dict[str, Label]] = {}
        for tensor, label in supposed:
            self._supposed.setdefault(id(tensor.graph), {})[tensor.name] = label
        self.unknown: str | None = None

    def run(
        self, graph: tf.Graph, inputs: Sequence[Label | None], flow: _Flow, base: _Flow | None
    ) -> list[Label | None]:
        """Fills `flow` with the labels that differ from `base`; returns those of the outputs."""
        # Raises a `ConflictError` if an element of one example in `base` belongs to others as well.
        for tensor, label in zip(graph.inputs, inputs, strict=True):
            self._note(tensor, label, flow, base)
        supposed = self._supposed.get(id(graph), {})
        for node in self._nodes(graph):
            if supposed and node.outputs and node.outputs[0].name in supposed:
                flow.labels[node.outputs[0].name] = supposed[node.outputs[0].name]
                continue
            changed = base is None or any(name in flow.labels for name in node.inputs)
            if not changed and self._supposed.keys().isdisjoint(node.graphs):
                continue
            labels = [_label(name, flow, base) for name in node.inputs]
            if node.functions:
                results = self._call(node, labels, flow, base)
            else:
                results = apply_rule(node.operation, labels)
                if self.unknown is None and base is not None and any(r is None for r in results):
                    self.unknown = node.operation.type
            for tensor, label in zip(node.outputs, results, strict=True):
                self._note(tensor, label, flow, base)
        return [_label(tensor.name, flow, base) for tensor in graph.outputs]

    def _note(
        self, tensor: tf.Tensor, label: Label | None, flow: _Flow, base: _Flow | None
    ) -> None:
        if base is None:
            flow.labels[tensor.name] = label
            return
        before = base.labels[tensor.name]
        if before is None:
            return
        if label is None:
            flow.labels[tensor.name] = None
            return
        rank = max(before.ndim, label.ndim)
        before, label = of_rank(before, rank), of_rank(label, rank)
        if ((before >= 0) & (label != before)).any():
            raise ConflictError
        same = np.broadcast_arrays(before, label)
        if not np.array_equal(same[0], same[1]):
            flow.labels[tensor.name] = label

    def _call(
        self, node: _Node, labels: list[Label | None], flow: _Flow, base: _Flow | None
    ) -> list[Label | None]:
        """Goes through the functions that an operation calls."""
        name, kind = node.operation.name, node.operation.type
        bases = [None] * len(node.functions) if base is None else base.inner[name]
        flows = flow.inner[name] = [_Flow() for _ in node.functions]
        if kind in LOOPS:
            return self._loop(node.functions, labels, flows, bases)
        arguments = labels[1:] if kind in BRANCHES else labels
        results = [
            self.run(function, arguments, inner, old)
            for function, inner, old in zip(node.functions, flows, bases, strict=True)
        ]
        return [_merged(pair) for pair in zip(*results, strict=True)]

    def _loop(
        self,
        functions: list[Any],
        state: list[Label | None],
        flows: list[_Flow],
        bases: Sequence[_Flow | None],
    ) -> list[Label | None]:
        """Follows the body until the labels of the state stay the same, else unknown."""
        for _ in range(_TURNS):
            for number, function in enumerate(functions):
                flows[number].labels.clear()
                flows[number].inner.clear()
                results = self.run(function, state, flows[number], bases[number])
                if len(results) == len(state):
                    after = [_merged(pair) for pair in zip(state, results, strict=True)]
            if all(_same(a, b) for a, b in zip(state, after, strict=True)):
                return after
            state = after
        return [None] * len(state)


def _label(name: str, flow: _Flow, base: _Flow | None) -> Label | None:
    if name in flow.labels or base is None:
        return flow.labels[name]
    return base.labels[name]


def _merged(labels: Sequence[Label | None]) -> Label | None:
    """Returns the label of a tensor that has one of these labels."""
    known = [label for label in labels if label is not None]
    if len(known) < len(labels):
        return None
    try:
        merged = compressed(joined(known))
    except UnknownLabelError:
        return None
    return None if (merged == SEVERAL).any() else merged


def _same(a: Label | None, b: Label | None) -> bool:
    if a is None or b is None:
        return a is b
    rank = max(a.ndim, b.ndim)
    a, b = of_rank(a, rank), of_rank(b, rank)
    return a.shape == b.shape and bool((a == b).all())


def labels_of_batch(tensors: Sequence[tf.TensorSpec], dim: int) -> list[Label]:
    """Returns the labels of a pipeline's inputs, which are cut along `dim`."""
    return [along(dim, t.shape.rank, np.arange(static_sizes(t)[dim])) for t in tensors]


class DrawsOfStage:
    """The draws of a stage for the whole batch, and the positions of examples in them."""

    # `graph` is the stage traced with the whole batch; `inputs` gives labels of its inputs by name,
    # the others belong to no example; `examples` is the size of the batch.

    def __init__(
        self,
        graph: tf.Graph,
        drawn: Mapping[str, WholeDraw],
        inputs: Callable[[], Mapping[str, Label | None]],
        examples: int,
    ) -> None:
        self._graph, self._inputs, self._examples = graph, inputs, examples
        self._flow: ExampleFlow | None = None
        self.whole = WholeDraws(drawn, self._before)

    def labels(self, tensors: Sequence[tf.Tensor]) -> list[Label | None]:
        """Returns the labels of tensors of the graph."""
        return [self._followed().label(tensor) for tensor in tensors]

    def _followed(self) -> ExampleFlow:
        if self._flow is None:
            known = self._inputs()
            labels = [known.get(tensor.name, NO_EXAMPLES) for tensor in self._graph.inputs]
            self._flow = ExampleFlow(self._graph, labels)
        return self._flow

    def _before(self, name: str, dim: int, folded: int) -> int:
        if folded == 1:
            return 1
        draw = self.whole.by_name[name]
        orders = [n for n in range(1, folded + 1) if folded % n == 0]
        supposed = {n: self._supposed(draw, dim, n) for n in orders}
        reason = "each processor draws its own slice"
        if draw.parts:
            flow = self._followed()
            fitting = [n for n in orders if flow.fits(supposed[n])]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                kind = flow.obstacle(supposed[fitting[0]])
                reason = (
                    f"no rule says what a {kind} operation does with them"
                    if kind
                    else "they meet no element that is known to belong to an example"
                )
            else:
                reason = "in each order they meet activations of another example"
        raise PipelineError(
            f"layer {name.rpartition(':')[0]!r} draws random numbers of shape {draw.sizes} for the "
            f"whole batch. Other dims, of {folded} elements, are folded into dim {dim} with the "
            f"{self._examples} examples, and their order cannot be found: {reason}. Draw the "
            "numbers in a shape where the batch is a separate dim (before that dim is reshaped), "
            "or use a single microbatch"
        )

    def _supposed(self, draw: WholeDraw, dim: int, before: int) -> list[tuple[tf.Tensor, Label]]:
        """Returns the parts of a draw, with their labels if `before` elements precede the batch."""
        size, rank = draw.sizes[dim], len(draw.sizes)
        behind = size // (before * self._examples)
        examples = np.arange(size) // behind % self._examples
        return [
            (part, along(dim, rank, examples[place[dim] :][: static_sizes(part)[dim]]))
            for part, place in draw.parts
        ]
