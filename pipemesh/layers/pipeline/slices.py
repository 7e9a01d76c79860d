"""Stages that get slices of sequences: their layers, and what attention hands on between slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import all_layers
from pipemesh.layers.named import NamedLayer, current_lowering
from pipemesh.layers.named.past import Past, past_scope
from pipemesh.layers.pipeline.alike_stages import like_earlier, shapes_text
from pipemesh.lowering.lowering import Slices
from pipemesh.plan.slices import Span
from pipemesh.recurrent import current_slice
from pipemesh.recurrent.stage import calling_for


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


# Equal parts of a row that are counted for `row_work`.
_PARTS = 16


def row_work(
    name: str, layers: Sequence[Any], shapes: Sequence[Any], dim: int = 1
) -> list[list[float]]:
    """Returns for each layer its work in equal parts of a row, first to last.

    Work is the flops that layers count (`FPropMeta`), given the positions before each part.

    Args:
        name: the stack, for errors.
        layers: params of the layers, first to last.
        shapes: a `tshape.Shape` of each input of the first layer, or None; they may be nested.
        dim: the dim of positions.

    Raises:
        PipelineError: a layer does not count its work.
    """
    sizes = [shape.ToTensorShape().as_list() for shape in py_utils.Flatten(shapes) if shape]
    length = next(size[dim] for size in sizes if len(size) > dim)
    count = min(_PARTS, length)
    work: list[list[float]] = [[] for _ in layers]
    like = like_earlier(layers)
    for number in range(count):
        begin, end = (length * i // count for i in (number, number + 1))

        def part(shape: Any, positions: int = end - begin) -> Any:
            if shape is None:
                return None
            size = shape.ToTensorShape().as_list()
            if len(size) > dim:
                size[dim] = positions
            return tshape.Shape(size)

        given: Sequence[Any] = tuple(tf.nest.map_structure(part, shape) for shape in shapes)
        known: dict[Any, Any] = {}
        with calling_for(number, count, span=Span(begin, length)):
            for layer, same, parts in zip(layers, like, work, strict=True):
                key = same, shapes_text(given)
                try:
                    meta = known[key] if key in known else layer.cls.FPropMeta(layer, *given)
                    flops, out_shapes = float(meta.flops), meta.out_shapes
                except Exception as error:
                    raise PipelineError(
                        f"{name}: slices of equal work are cut by the work that layers count, and "
                        f"layer {layer.name!r} ({layer.cls.__name__}) cannot count its own "
                        f"({type(error).__name__}: {error}). Give it an FPropMeta, or use slices "
                        "of equal length, such as seq1f1b:4"
                    ) from error
                # Parts differ by a position if these do not divide.
                parts.append(flops / (end - begin) * length / count)
                known[key], given = meta, out_shapes
    return work


def past_bytes(stage: Any, length: int) -> int:
    """Returns the bytes that a row of so many positions hands on from slice to slice."""
    return num_bytes(PastOfStage(stage, 1, length, 2).specs) if length else 0


class PastOfStage:
    """The carry of a stage: the tensors that its attention hands on from slice to slice.

    For each layer of attention, in order, there are keys, values and segments, and of each one
    tensor for each slice but the last, and for each device of a replica. If slices differ in
    length, the carry grows: it begins with nothing, and each slice but the last adds a tensor for
    each of these, behind those of the slices before.
    """

    def __init__(
        self, stage: Any, rows: int, length: int, num_slices: int, grows: bool = False
    ) -> None:
        # `length` is that of a slice. Call it under the lowering of the stage.
        self._grows = grows
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
        self.is_handed_on = bool(every)
        every = [] if grows else every
        self.specs = [spec for spec in every for _ in range(self._number)]
        self.places = [place for _ in every for place in range(self._number)]

    @contextlib.contextmanager
    def scope(self, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
        """Makes layers inside continue a carry; yields a function that returns the new one."""
        if self._grows:
            with self._growing(carry) as extended:
                yield extended
            return
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

    @contextlib.contextmanager
    def _growing(self, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
        """Returns `scope` for slices that differ in length."""
        names = [(path, i) for path, of_layer in self._specs.items() for i in range(len(of_layer))]
        of_slice = len(names) * self._number
        kept: dict[str, list[list[Slices]]] = {
            path: [[] for _ in of_layer] for path, of_layer in self._specs.items()
        }
        count = len(carry) // of_slice if of_slice else 0
        rest = iter(carry)
        for path, i in names * count:
            kept[path][i].append(tuple(next(rest) for _ in range(self._number)))

        def extended() -> list[tf.Tensor]:
            if current_slice().span is None or count == self._parts:
                # No slice needs those of the last one.
                return []
            added: list[tf.Tensor] = []
            for path, i in names:
                parts = past.kept[path][i]
                if len(parts) > count:
                    added += parts[count]
                    continue
                # Tokens have no segments.
                keys, dtype = past.kept[path][0][count], self._specs[path][i].dtype
                added += current_lowering().map(lambda _, d=dtype: tf.zeros([0], d), keys)
            return [*carry, *added]

        with past_scope(Past(kept)) as past:
            yield extended
