"""Stages that get slices of sequences: their layers, and what attention hands on between slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import all_layers
from pipemesh.layers.named import NamedLayer, current_lowering
from pipemesh.layers.named.past import Past, past_scope


def takes_slices(layer: Any) -> bool:
    """Returns whether a layer says that it can be given slices: `takes_slices` is true.

    Its class, or a subclass, must say so: a subclass with another `FProp` has to say it again.
    """
    bases = type(layer).__mro__
    computes, says = (
        next((number for number, base in enumerate(bases) if name in vars(base)), len(bases))
        for name in ("FProp", "takes_slices")
    )
    return says <= computes and bool(layer.takes_slices)


def check_takes_slices(name: str, stages: Sequence[Any], num_slices: int) -> None:
    """Checks that all layers of the stages of a stack can be given slices of sequences."""
    for stage in stages:
        for layer in all_layers(stage):
            if takes_slices(layer):
                continue
            kind = type(layer).__name__
            raise PipelineError(
                f"{name}: the schedule cuts sequences into {num_slices} slices, and layer "
                f"{layer.path!r} ({kind}) does not say that it can be given one: what looks at "
                "other positions would see those of the slice alone. Give a schedule without "
                f"slices, such as 1f1b; or, if each position of {kind}'s results depends on the "
                f"same one of its inputs alone, set takes_slices = True in the class"
            )
        if stage.accumulators.Flatten():
            raise PipelineError(
                f"{name}: the schedule cuts sequences into {num_slices} slices, and stage "
                f"{stage.params.name!r} has accumulators, which add up microbatches; give a "
                "schedule without slices, such as 1f1b"
            )


def sliced_positions(stages: Sequence[Any], shapes: Any) -> int:
    """Returns the positions of a row, by the shapes of the inputs, if all layers of the stages can
    be given slices of it; 0 if one cannot.
    """
    sizes = [shape.ToTensorShape().as_list() for shape in py_utils.Flatten(shapes) if shape]
    lengths = {size[1] for size in sizes if len(size) > 1}
    try:
        check_takes_slices("", stages, 2)
    except PipelineError:
        return 0
    return lengths.pop() if len(lengths) == 1 else 0


def past_bytes(stage: Any, length: int) -> int:
    """Returns the bytes that a row of so many positions hands on from slice to slice."""
    return num_bytes(PastOfStage(stage, 1, length, 2).specs) if length else 0


class PastOfStage:
    """The carry of a stage: the tensors that its attention hands on from slice to slice.

    For each layer of attention, in order, there are keys, values and segments, and of each one
    tensor for each slice but the last, and for each device of a replica.
    """

    def __init__(self, stage: Any, rows: int, length: int, num_slices: int) -> None:
        # `length` is that of a slice. Call it under the lowering of the stage.
        named = [layer for layer in all_layers(stage) if isinstance(layer, NamedLayer)]
        specs = {layer.path: layer.PastSpecs(rows, length) for layer in named}
        self._specs = {path: of_layer for path, of_layer in specs.items() if of_layer}
        self._parts, self._number = num_slices - 1, current_lowering().num_slices
        every = [
            spec
            for of_layer in self._specs.values()
            for spec in of_layer
            for _ in range(self._parts)
        ]
        self.specs = [spec for spec in every for _ in range(self._number)]
        self.places = [place for _ in every for place in range(self._number)]

    @contextlib.contextmanager
    def scope(self, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
        """Makes layers inside continue a carry; yields a function that returns the new one."""
        rest = iter(carry)

        def of_slice() -> tuple[tf.Tensor, ...]:
            return tuple(next(rest) for _ in range(self._number))

        kept = {
            path: [[of_slice() for _ in range(self._parts)] for _ in of_layer]
            for path, of_layer in self._specs.items()
        }
        with past_scope(Past(kept)) as past:
            yield lambda: [
                tensor
                for held in past.kept.values()
                for parts in held
                for slices in parts
                for tensor in slices
            ]
