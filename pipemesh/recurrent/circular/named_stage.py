"""A stage of layers that are functions of tensors with named dims."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering.differentiate import call_alone, check_no_layers_axis, lost_in_layer
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.recurrent.circular.layer_position import LayerPosition
from pipemesh.recurrent.circular.stage_weight import StageWeight
from pipemesh.recurrent.circular.tick_loop import Leaves, Tick, keep
from pipemesh.recurrent.options import sum_dtype

# Takes and returns activations, one tensor or a tuple. Its arguments are the activations, the
# weights, the position, and the tensors of `along`, if any.
Activations = Tensor | tuple[Tensor, ...]
LayerFunction = Callable[..., Activations]


@dataclasses.dataclass(frozen=True)
class LoopWeight:
    """The loop's description of a weight.

    Attributes:
        name: its name.
        shape: of the weight of one layer.
        stacked: True if each layer has its own weight. The slices then begin with the dims virtual
            stage, core (of size 1) and layer within the stage.
        summed_later: axes over which the gradients that the loop returns must still be summed.
    """

    name: str
    shape: Shape
    stacked: bool
    summed_later: tuple[str, ...]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes of `summed_later` along which all copies compute the same layer."""
        return tuple(axis for axis in self.summed_later if axis != LAYERS_AXIS)


class NamedStage:
    """The computation of one tick of a `SimdPipeline`: some layers, one after the other.

    At ticks without work a core computes with whatever its buffer holds.

    Args:
        lowering: of all tensors.
        layer: the function of one layer.
        layers_per_stage: number of layers of a stage.
        shapes: of the activations of one microbatch; a single shape if the layer takes one tensor.
        batch: the batch dim of the whole batch.
        weights: in the order of the slices.
        along: shapes of the layer's other inputs for a microbatch, and slices of all microbatches.
    """

    def __init__(
        self,
        lowering: Lowering,
        layer: LayerFunction,
        layers_per_stage: int,
        shapes: Shape | tuple[Shape, ...],
        batch: Dim,
        weights: Sequence[LoopWeight],
        along: Sequence[tuple[Shape, Slices]] = (),
    ) -> None:
        self._lowering = lowering
        self._layer = layer
        self._layers_per_stage = layers_per_stage
        self._is_one = isinstance(shapes, Shape)
        self._shapes = (shapes,) if isinstance(shapes, Shape) else shapes
        self._batch = batch
        self._weights = tuple(weights)
        self._along = tuple(along)

    def forward(self, now: Tick, x: Leaves, weights: Sequence[Slices]) -> Leaves:
        """Returns the activations after the stage."""
        chosen = self._choose(weights, now)
        return self._stage(now, x, chosen, chosen)

    def zero_sums(self, weights: Sequence[Slices]) -> tuple[Slices, ...]:
        """Returns the sums of gradients before the first tick."""
        return tuple(
            self._lowering.raw_map(lambda w: tf.zeros(w.shape, sum_dtype(w.dtype)), part)
            for part in weights
        )

    def backward(
        self,
        now: Tick,
        x: Leaves,
        weights: Sequence[Slices],
        grad_y: Leaves,
        sums: Sequence[Slices],
    ) -> tuple[Leaves, tuple[Slices, ...]]:
        """Recomputes the stage; returns the gradient of its input, and the new sums."""
        grad_x, grad_weights = self._gradient(now, x, weights, grad_y)
        added = tuple(
            self._add(weight, now, sum_, grad)
            for weight, sum_, grad in zip(self._weights, sums, grad_weights, strict=True)
        )
        return grad_x, added

    def _choose(self, weights: Sequence[Slices], now: Tick) -> list[list[Slices]]:
        """Returns the weights of each layer of the stage."""
        each = self._lowering.raw_map
        chosen: list[list[Slices]] = []
        for j in range(self._layers_per_stage):
            row: list[Slices] = []
            for weight, part in zip(self._weights, weights, strict=True):
                if weight.stacked:
                    row.append(each(lambda w, which, j=j: w[which, 0, j], part, now.rounds))
                else:
                    # A separate tensor for each use, so that their gradients stay separate.
                    row.append(each(tf.identity, part))
            chosen.append(row)
        return chosen

    def _stage(
        self,
        now: Tick,
        x: Leaves,
        whole: Sequence[Sequence[Slices]],
        partial: Sequence[Sequence[Slices]],
    ) -> Leaves:
        lowering = self._lowering
        along = [
            Tensor(lowering, lowering.raw_map(tf.gather, slots, now.microbatches), shape)
            for shape, slots in self._along
        ]
        for j, (own, shared) in enumerate(zip(whole, partial, strict=True)):
            numbers = lowering.raw_map(
                lambda stage, j=j: stage * self._layers_per_stage + j, now.stages
            )
            size = self._shapes[0][self._batch.name].size
            position = LayerPosition(lowering, numbers, now.microbatches, self._batch, size)
            weights = {
                weight.name: StageWeight(lowering, a, weight.shape, b, weight.batch_axes)
                for weight, a, b in zip(self._weights, own, shared, strict=True)
            }
            x_in = tuple(
                Tensor(lowering, leaf, shape) for leaf, shape in zip(x, self._shapes, strict=True)
            )
            given = [part for parts in (*x, *own, *shared) for part in parts]
            with check_no_layers_axis(lowering), position.entered():
                y = call_alone(
                    functools.partial(self._call_layer, x_in, weights, position, along),
                    given,
                    lambda y: [part for leaf in y for part in leaf.slices],
                    lost_in_layer,
                )
            x = tuple(leaf.slices for leaf in y)
        return x

    def _call_layer(
        self,
        x: tuple[Tensor, ...],
        weights: Mapping[str, Tensor],
        position: LayerPosition,
        along: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        given = x[0] if self._is_one else x
        y: Any = self._layer(given, weights, position, *along)
        leaves = (y,) if self._is_one else y
        if not isinstance(leaves, tuple) or not _are_alike(leaves, x):
            raise PipelineError(
                f"the layer function returned {y!r} for {given!r}; all layers are alike, so its "
                "result has the shape and dtype of its input, dims in the same order"
            )
        return leaves

    def _gradient(
        self, now: Tick, x: Leaves, weights: Sequence[Slices], grad_y: Leaves
    ) -> tuple[Leaves, list[list[Slices]]]:
        """Recomputes a stage; returns gradients of its input and of each layer's weights."""
        each = self._lowering.raw_map
        whole = self._choose(weights, now)
        partial = [[each(tf.identity, part) for part in row] for row in whole]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x, whole, partial])
            y = self._stage(now, x, whole, partial)
        # Nested like the sources of the gradient, which types cannot express.
        grads: Any = tape.gradient(
            [part for leaf in y for part in leaf],
            [x, whole, partial],
            output_gradients=[part for leaf in grad_y for part in leaf],
        )
        grad_x, grad_whole, grad_partial = grads
        results: list[list[Slices]] = []
        for i, weight in enumerate(self._weights):
            copies = self._lowering.group_size(weight.batch_axes)
            results.append(
                [
                    self._join(part[i], a[i], b[i], copies)
                    for part, a, b in zip(whole, grad_whole, grad_partial, strict=True)
                ]
            )
        of_x = tuple(self._or_zeros(*pair) for pair in zip(grad_x, x, strict=True))
        return of_x, results

    def _or_zeros(self, grads: Sequence[Any], like: Slices) -> Slices:
        if any(grad is None for grad in grads):
            return self._lowering.raw_map(tf.zeros_like, like)
        # Gradients of lookups are sparse.
        return self._lowering.raw_map(tf.convert_to_tensor, tuple(grads))

    def _join(self, part: Slices, whole: Any, partial: Any, copies: int) -> Slices:
        """Adds a copy's contribution to a sum and its share of a tensor that copies have whole."""
        if any(grad is None for grad in whole):
            return self._or_zeros(partial, part)
        share = self._lowering.raw_map(
            lambda grad: tf.convert_to_tensor(grad) / tf.cast(copies, grad.dtype), tuple(whole)
        )
        if any(grad is None for grad in partial):
            return share
        return self._lowering.raw_map(tf.add, share, self._or_zeros(partial, part))

    def _add(self, weight: LoopWeight, now: Tick, sums: Slices, grads: Sequence[Slices]) -> Slices:
        """Adds one tick's gradients of a weight."""

        def add(sum_: tf.Tensor, busy: tf.Tensor, which: tf.Tensor, *parts: Any) -> tf.Tensor:
            wide = [tf.cast(part, sum_.dtype) for part in parts]
            if not weight.stacked:
                return sum_ + keep(busy, tf.add_n(wide))
            grad = keep(busy, tf.stack(wide))
            if sum_.shape[0] == 1:
                return sum_ + grad[None, None]
            return tf.tensor_scatter_nd_add(sum_, [[which]], grad[None, None])

        return self._lowering.raw_map(add, sums, now.busy, now.rounds, *grads)


def _are_alike(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> bool:
    return len(outputs) == len(inputs) and all(
        isinstance(y, Tensor) and y.shape == x.shape and y.dtype == x.dtype
        for y, x in zip(outputs, inputs, strict=True)
    )
