"""Follows the examples of a batch through a graph.

A random tensor in one of whose dims others are folded into the batch (`[batch * heads, ...]`) does
not say whether the examples come first. What it meets does: a mask is multiplied with activations,
and each of these comes, by way of reshapes and products, from one example of the stage's inputs. So
each order is tried: under a wrong one, numbers of one example would meet activations of another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.lowering.called_functions import called_functions
from pipemesh.lowering.example_labels import (
    SEVERAL,
    Label,
    UnknownLabelError,
    compressed,
    joined,
    of_rank,
)
from pipemesh.lowering.example_rules import apply_rule

_CALLS = ("PartitionedCall", "StatefulPartitionedCall")
_BRANCHES = ("If", "StatelessIf", "Case", "StatelessCase")
_LOOPS = ("While", "StatelessWhile")
_KNOWN = (*_CALLS, *_BRANCHES, *_LOOPS)
# How often a loop's body is followed until its state has a label that stays.
_TURNS = 5


class ConflictError(Exception):
    """Elements of different examples meet."""


@dataclasses.dataclass
class _Flow:
    """The labels of a graph's tensors, and the flows of the functions that its operations call."""

    labels: dict[str, Label | None] = dataclasses.field(default_factory=dict)
    inner: dict[str, list[_Flow]] = dataclasses.field(default_factory=dict)


class ExampleFlow:
    """Whose the tensors of a graph are, if its inputs belong to known examples.

    Args:
        graph: of a function.
        inputs: a label for each of its inputs; None if that is unknown.
    """

    def __init__(self, graph: Any, inputs: Sequence[Label | None]) -> None:
        self._graph = graph
        self._inputs = list(inputs)
        self._flow = _Flow()
        _Follow([]).run(graph, self._inputs, self._flow, None)

    def label(self, tensor: tf.Tensor) -> Label | None:
        """The label of a tensor of the graph."""
        return self._flow.labels[tensor.name]

    def obstacle(self, given: Sequence[tuple[tf.Tensor, Label]]) -> str | None:
        """Of which kind the first operation is behind some tensors whose result is unknown."""
        follow = _Follow(given)
        try:
            follow.run(self._graph, self._inputs, _Flow(), self._flow)
        except ConflictError:
            return None
        return follow.unknown

    def fits(self, given: Sequence[tuple[tf.Tensor, Label]]) -> bool:
        """Whether all that some tensors meet belongs to the same examples.

        Args:
            given: the tensors, in the graph or in functions that it calls, and whose their elements
                are, supposedly.
        """
        try:
            _Follow(given).run(self._graph, self._inputs, _Flow(), self._flow)
        except ConflictError:
            return False
        return True


class _Follow:
    """Goes through a graph, operation by operation.

    Args:
        given: tensors whose labels are given.
    """

    def __init__(self, given: Sequence[tuple[tf.Tensor, Label]]) -> None:
        self._given = {(id(tensor.graph), tensor.name): label for tensor, label in given}
        self._graphs = {id(tensor.graph) for tensor, _ in given}
        self.unknown: str | None = None

    def run(
        self, graph: Any, inputs: Sequence[Label | None], flow: _Flow, base: _Flow | None
    ) -> list[Label | None]:
        """Fills `flow` with the labels that differ from `base`; returns those of the outputs.

        Raises:
            ConflictError: what belongs to one example in `base` belongs to others as well.
        """
        for tensor, label in zip(graph.inputs, inputs, strict=True):
            self._note(tensor, label, flow, base)
        placeholders = {tensor.op.name for tensor in graph.inputs}
        for operation in graph.get_operations():
            if operation.name in placeholders:
                continue
            given = [_of(tensor, flow, base) for tensor in operation.inputs]
            changed = base is None or any(t.name in flow.labels for t in operation.inputs)
            functions = list(called_functions(graph, operation))
            if functions and operation.type in _KNOWN:
                self._call(operation, functions, given, changed, flow, base)
            elif self._given and operation.outputs and self._is_given(graph, operation):
                tensor = operation.outputs[0]
                flow.labels[tensor.name] = self._given[id(graph), tensor.name]
            elif changed:
                results = apply_rule(operation, given)
                if self.unknown is None and base is not None and any(r is None for r in results):
                    self.unknown = operation.type
                for tensor, label in zip(operation.outputs, results, strict=True):
                    self._note(tensor, label, flow, base)
        return [_of(tensor, flow, base) for tensor in graph.outputs]

    def _is_given(self, graph: Any, operation: Any) -> bool:
        return (id(graph), operation.outputs[0].name) in self._given

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
        if not np.array_equal(*np.broadcast_arrays(before, label)):
            flow.labels[tensor.name] = label

    def _call(
        self,
        operation: Any,
        functions: list[Any],
        given: list[Label | None],
        changed: bool,
        flow: _Flow,
        base: _Flow | None,
    ) -> None:
        if not changed and not _contain(functions, self._graphs):
            return
        bases = [None] * len(functions) if base is None else base.inner[operation.name]
        flows = flow.inner[operation.name] = [_Flow() for _ in functions]
        if operation.type in _LOOPS:
            results = self._loop(functions, given, flows, bases)
        else:
            arguments = given[1:] if operation.type in _BRANCHES else given
            each = [
                self.run(function, arguments, own, old)
                for function, own, old in zip(functions, flows, bases, strict=True)
            ]
            results = [_merged(labels) for labels in zip(*each, strict=True)]
        for tensor, label in zip(operation.outputs, results, strict=True):
            self._note(tensor, label, flow, base)

    def _loop(
        self,
        functions: list[Any],
        state: list[Label | None],
        flows: list[_Flow],
        bases: Sequence[_Flow | None],
    ) -> list[Label | None]:
        """Follows the body until what goes round has labels that stay; unknown if they do not."""
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


def _contain(functions: list[Any], graphs: set[int]) -> bool:
    """Whether one of the graphs is that of a function, or of one that it calls."""
    return any(
        id(function) in graphs
        or any(
            _contain(list(called_functions(function, operation)), graphs)
            for operation in function.get_operations()
        )
        for function in functions
    )


def _of(tensor: tf.Tensor, flow: _Flow, base: _Flow | None) -> Label | None:
    if tensor.name in flow.labels or base is None:
        return flow.labels[tensor.name]
    return base.labels[tensor.name]


def _merged(labels: Sequence[Label | None]) -> Label | None:
    """The label of a tensor that is one or another."""
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
