"""The loop over ticks, forward and backward."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering.captures import call_alone, check_no_layers_axis, lost_in_layer
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.recurrent.circular.layer_position import LayerPosition
from pipemesh.recurrent.circular.stage_weight import StageWeight
from pipemesh.recurrent.circular.ticks import TickPlan

LayerFunction = Callable[[Tensor, Mapping[str, Tensor], LayerPosition], Tensor]


@dataclasses.dataclass(frozen=True)
class LoopWeight:
    """What the loop knows of a weight.

    Attributes:
        name: its name.
        shape: of the weight of one layer.
        stacked: whether each layer has its own; the slices then have the dims circle, stage (of
            size 1) and layer within the stage in front.
        summed_later: axes over which the gradients that the loop returns are still to be summed.
    """

    name: str
    shape: Shape
    stacked: bool
    summed_later: tuple[str, ...]

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """Those of `summed_later` along which all copies work on the same layer."""
        return tuple(axis for axis in self.summed_later if axis != LAYERS_AXIS)


@dataclasses.dataclass(frozen=True)
class _Tick:
    """What happens at one tick; `...s` hold a value for each processor."""

    circles: Slices
    microbatches: Slices
    busy: Slices
    # Where the first core takes its input from, and where it puts what the last one sends.
    read_slot: tf.Tensor
    write_slot: tf.Tensor
    writes: tf.Tensor


class TickLoop:
    """Runs all ticks of a pipeline.

    The state of a core is what its neighbour sent (`buffer`) and a slot for each microbatch
    (`stream`): in the beginning these hold the inputs, of which the first core takes one each
    tick; what leaves the last core goes to the first one's slots, as input of the next circle or
    as output. The other cores' slots are never used. Forward, each tick's input is saved;
    backward, the ticks run in reverse order, each core recomputes its stage, and gradients are
    sent the other way. At ticks without work a core computes with what happens to be there, and
    `where` keeps all of it, NaN too, from results and gradients.

    Args:
        plan: the clock.
        lowering: of all tensors.
        layer: the function of one layer.
        layers_per_stage: how many layers a stage has.
        shape: of the activations of one microbatch.
        batch: the batch dim of the whole batch.
        weights: in the order in which their slices will be given.
    """

    def __init__(
        self,
        plan: TickPlan,
        lowering: Lowering,
        layer: LayerFunction,
        layers_per_stage: int,
        shape: Shape,
        batch: Dim,
        weights: Sequence[LoopWeight],
    ) -> None:
        self._plan = plan
        self._lowering = lowering
        self._layer = layer
        self._layers_per_stage = layers_per_stage
        self._shape = shape
        self._batch = batch
        self._weights = tuple(weights)
        if plan.num_stages > 1:
            self._stages = lowering.coordinate(LAYERS_AXIS)
        else:
            self._stages = lowering.raw_map(lambda: tf.constant(0))
        self._is_first = lowering.raw_map(lambda stage: tf.equal(stage, 0), self._stages)

    def forward(self, stream: Slices, weights: Sequence[Slices]) -> tuple[Slices, Slices]:
        """Runs the stages.

        Args:
            stream: `[M, ...]`, the microbatches; used on the first cores only.
            weights: slices of each weight.

        Returns:
            The outputs in the form of `stream`, on the first cores and zeros elsewhere; and what
            `backward` needs.
        """
        each = self._lowering.raw_map

        def tick(number: Any, buffer: Slices, stream: Slices, saved: Slices) -> Any:
            now = self._at(number)
            x = each(
                lambda first, slots, sent: tf.where(first, slots[now.read_slot], sent),
                self._is_first,
                stream,
                buffer,
            )
            saved = each(lambda slots, value: _put(slots, number, value), saved, x)
            chosen = self._choose(weights, now)
            sent = self._shift(self._stage(now, x, chosen, chosen), 1, backward=False)
            stream = each(
                lambda slots, value: _put(
                    slots,
                    now.write_slot,
                    tf.where(now.writes, value, slots[now.write_slot]),
                ),
                stream,
                sent,
            )
            return number + 1, sent, stream, saved

        ticks = self._plan.num_ticks
        buffer = each(lambda slots: tf.zeros_like(slots[0]), stream)
        saved = each(lambda slots: tf.zeros([ticks, *slots.shape[1:]], slots.dtype), stream)
        state = self._run(tick, (tf.constant(0), buffer, stream, saved))
        _, _, stream, saved = state
        outputs = each(
            lambda first, slots: tf.where(first, slots, tf.zeros_like(slots)),
            self._is_first,
            stream,
        )
        return outputs, saved

    def backward(
        self, grads: Slices, saved: Slices, weights: Sequence[Slices]
    ) -> tuple[Slices, list[Slices]]:
        """Runs the ticks in reverse order.

        Args:
            grads: of the outputs; those of the first cores count.
            saved: from `forward`.
            weights: slices of each weight.

        Returns:
            The gradients of `stream`, on the first cores and zeros elsewhere, and of each weight.
        """
        each = self._lowering.raw_map
        last = self._plan.num_ticks - 1

        def tick(number: Any, buffer: Slices, stream: Slices, sums: Any) -> Any:
            now = self._at(last - number)
            sent = each(
                lambda first, slots, grad: tf.where(
                    first, _keep(now.writes, slots[now.write_slot]), grad
                ),
                self._is_first,
                stream,
                buffer,
            )
            stream = each(
                lambda slots: _put(
                    slots,
                    now.write_slot,
                    _keep(tf.logical_not(now.writes), slots[now.write_slot]),
                ),
                stream,
            )
            grad_y = each(_keep, now.busy, self._shift(sent, -1, backward=True))
            x = each(lambda slots: slots[last - number], saved)
            grad_x, grad_weights = self._gradient(now, x, weights, grad_y)
            grad_x = each(_keep, now.busy, grad_x)
            stream = each(
                lambda slots, grad, first: _put(
                    slots, now.read_slot, slots[now.read_slot] + _keep(first, grad)
                ),
                stream,
                grad_x,
                self._is_first,
            )
            buffer = each(
                lambda first, grad: _keep(tf.logical_not(first), grad), self._is_first, grad_x
            )
            sums = tuple(
                self._add(weight, now, sum_, grad)
                for weight, sum_, grad in zip(self._weights, sums, grad_weights, strict=True)
            )
            return number + 1, buffer, stream, sums

        stream = each(_keep, self._is_first, grads)
        buffer = each(lambda slots: tf.zeros_like(slots[0]), stream)
        sums = tuple(
            each(lambda part: tf.zeros(part.shape, _sum_dtype(part.dtype)), part)
            for part in weights
        )
        _, _, stream, sums = self._run(tick, (tf.constant(0), buffer, stream, sums))
        cast = [
            each(lambda sum_, part: tf.cast(sum_, part.dtype), sum_, part)
            for sum_, part in zip(sums, weights, strict=True)
        ]
        # The slots of microbatches that were read last hold the gradients of the inputs.
        return each(_keep, self._is_first, stream), cast

    def _run(self, tick: Callable[..., Any], state: tuple[Any, ...]) -> Any:
        ticks = self._plan.num_ticks
        # In eager mode every turn is built, and counts itself.
        with self._lowering.costs.repeated(1 if tf.executing_eagerly() else ticks):
            # One turn at a time: the turns' collectives must not overtake each other.
            return tf.while_loop(
                lambda number, *_: tf.less(number, ticks), tick, state, parallel_iterations=1
            )

    def _at(self, number: Any) -> _Tick:
        plan, each = self._plan, self._lowering.raw_map
        last_circle, last_slot = plan.num_circles - 1, plan.num_microbatches - 1

        def part(which: int, top: int) -> Slices:
            return each(
                lambda stage: tf.clip_by_value(plan.at(stage, number)[which], 0, top),
                self._stages,
            )

        _, read_slot, _ = plan.at(0, number)
        _, write_slot, writes = plan.at(plan.num_stages - 1, number)
        return _Tick(
            circles=part(0, last_circle),
            microbatches=part(1, last_slot),
            busy=each(lambda stage: plan.at(stage, number)[2], self._stages),
            read_slot=tf.minimum(read_slot, last_slot),
            write_slot=tf.minimum(write_slot, last_slot),
            writes=writes,
        )

    def _shift(self, x: Slices, offset: int, backward: bool) -> Slices:
        if self._plan.num_stages == 1:
            return x
        return self._lowering.raw_circle(x, LAYERS_AXIS, offset, backward=backward)

    def _choose(self, weights: Sequence[Slices], now: _Tick) -> list[list[Slices]]:
        """For each layer of the stage its weights."""
        each = self._lowering.raw_map
        chosen: list[list[Slices]] = []
        for j in range(self._layers_per_stage):
            row: list[Slices] = []
            for weight, part in zip(self._weights, weights, strict=True):
                if weight.stacked:
                    row.append(each(lambda w, circle, j=j: w[circle, 0, j], part, now.circles))
                else:
                    # A tensor of its own for each use, so that their gradients are told apart.
                    row.append(each(tf.identity, part))
            chosen.append(row)
        return chosen

    def _stage(
        self,
        now: _Tick,
        x: Slices,
        whole: Sequence[Sequence[Slices]],
        partial: Sequence[Sequence[Slices]],
    ) -> Slices:
        lowering, plan = self._lowering, self._plan
        for j, (own, shared) in enumerate(zip(whole, partial, strict=True)):
            numbers = lowering.raw_map(
                lambda circle, stage, j=j: (
                    (circle * plan.num_stages + stage) * self._layers_per_stage + j
                ),
                now.circles,
                self._stages,
            )
            size = self._shape[self._batch.name].size
            position = LayerPosition(lowering, numbers, now.microbatches, self._batch, size)
            weights = {
                weight.name: StageWeight(lowering, a, weight.shape, b, weight.batch_axes)
                for weight, a, b in zip(self._weights, own, shared, strict=True)
            }
            x_in = Tensor(lowering, x, self._shape)
            given = [*x, *(part for parts in (*own, *shared) for part in parts)]
            with check_no_layers_axis(lowering), position.entered():
                y = call_alone(
                    functools.partial(self._call_layer, x_in, weights, position),
                    given,
                    lambda y: y.slices,
                    lost_in_layer,
                )
            x = y.slices
        return x

    def _call_layer(
        self, x: Tensor, weights: Mapping[str, Tensor], position: LayerPosition
    ) -> Tensor:
        y = self._layer(x, weights, position)
        self._check_output(y, x)
        return y

    def _check_output(self, y: Any, x: Tensor) -> None:
        if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
            raise PipelineError(
                f"the layer function returned {y!r} for {x!r}; all layers are alike, so its result "
                "has the shape and dtype of its input, dims in the same order"
            )

    def _gradient(
        self, now: _Tick, x: Slices, weights: Sequence[Slices], grad_y: Slices
    ) -> tuple[Slices, list[list[Slices]]]:
        """Recomputes a stage: gradients of its input, and for each weight those of its layers."""
        each = self._lowering.raw_map
        whole = self._choose(weights, now)
        partial = [[each(tf.identity, part) for part in row] for row in whole]
        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch([x, whole, partial])
            y = self._stage(now, x, whole, partial)
        grads = tape.gradient(y, [x, whole, partial], output_gradients=grad_y)
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
        return self._or_zeros(grad_x, x), results

    def _or_zeros(self, grads: Sequence[Any], like: Slices) -> Slices:
        if any(grad is None for grad in grads):
            return self._lowering.raw_map(tf.zeros_like, like)
        # Gradients of lookups are sparse.
        return self._lowering.raw_map(tf.convert_to_tensor, tuple(grads))

    def _join(self, part: Slices, whole: Any, partial: Any, copies: int) -> Slices:
        """Adds what will be summed over copies to an equal share of what is whole on each."""
        if any(grad is None for grad in whole):
            return self._or_zeros(partial, part)
        share = self._lowering.raw_map(
            lambda grad: tf.convert_to_tensor(grad) / tf.cast(copies, grad.dtype), tuple(whole)
        )
        if any(grad is None for grad in partial):
            return share
        return self._lowering.raw_map(tf.add, share, self._or_zeros(partial, part))

    def _add(self, weight: LoopWeight, now: _Tick, sums: Slices, grads: Sequence[Slices]) -> Slices:
        """Adds one tick's gradients of a weight."""

        def add(sum_: tf.Tensor, busy: tf.Tensor, circle: tf.Tensor, *parts: Any) -> tf.Tensor:
            wide = [tf.cast(part, sum_.dtype) for part in parts]
            if not weight.stacked:
                return sum_ + _keep(busy, tf.add_n(wide))
            grad = _keep(busy, tf.stack(wide))
            if self._plan.num_circles == 1:
                return sum_ + grad[None, None]
            return tf.tensor_scatter_nd_add(sum_, [[circle]], grad[None, None])

        return self._lowering.raw_map(add, sums, now.busy, now.circles, *grads)


def _put(slots: tf.Tensor, at: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Replaces one slot."""
    return tf.tensor_scatter_nd_update(slots, [[at]], value[None])


def _keep(condition: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """The value, or zeros; a product would keep NaN."""
    return tf.where(condition, value, tf.zeros_like(value))


def _sum_dtype(dtype: tf.DType) -> tf.DType:
    """Sums over many ticks lose too much in 16 bits."""
    return tf.float32 if dtype in (tf.bfloat16, tf.float16) else dtype
