"""The loop over ticks: alike stages in turn, forward and backward, or around a ring of cores.

The state of a core is the tensor from its neighbour (`buffer`) and a slot for each microbatch. The
first core takes its input from the slot of the microbatch. The tensor that leaves the last core
goes to that slot, as input of the next stage or as output. The slots of the other cores are unused.
`where` keeps results of ticks without work, even NaN, out of results and gradients.

`forward` runs microbatches that wait in the slots, and saves the input of each tick. `backward`
runs the same ticks in the reverse order, recomputes each stage, and sends gradients in the other
direction. `run` is for microbatches that return: results of the last stage determine the next
inputs of the first one. It has no gradient.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from pipemesh.backend.complete_graphs import place_beside_inputs
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.schedule.builders import looped_ticks

# For each tensor of the activations its slices.
Leaves = tuple[Slices, ...]
# Sums of the gradients of weights: for each weight its slices, or for each stage its weights.
Sums = tuple[Slices, ...]


class Tick(NamedTuple):
    """The work of a core at a tick: int32 scalars, or `Slices` of these for all processors."""

    number: Any  # of the tick, equal for all cores
    turn: Any  # number of completed passes through all stages
    stage: Any
    round: Any  # index of the stage among those of the core
    microbatch: Any  # in decoding a group of prompts
    busy: Any  # bool; if false, the numbers are arbitrary valid ones


@dataclasses.dataclass(frozen=True)
class RingTicks:
    """The forward passes of `looped_bfs`, or with more turns `decode`, of `pipemesh.schedule`.

    Microbatches go round and round: one returns to a core after
    `max(num_microbatches, num_cores)` ticks.
    """

    num_cores: int
    num_microbatches: int
    num_rounds: int  # stages per core
    # An int, or an int32 scalar that is known only at run time; at least 1.
    num_turns: Any = 1

    @property
    def num_ticks(self) -> Any:
        """Returns the number of ticks until the last microbatch leaves the last stage."""
        return looped_ticks(self.num_cores, self.num_microbatches, self.num_turns * self.num_rounds)

    def at(self, number: Any, core: Any) -> Tick:
        """Returns the work of a core at a tick; both are ints or int32 scalars."""
        since = number - core
        index = tf.maximum(since, 0)
        passed, microbatch = index // self._period, index % self._period
        turn, round_ = passed // self.num_rounds, passed % self.num_rounds
        busy = (since >= 0) & (microbatch < self.num_microbatches) & (turn < self.num_turns)
        microbatch = tf.minimum(microbatch, self.num_microbatches - 1)
        return Tick(number, turn, round_ * self.num_cores + core, round_, microbatch, busy)

    @property
    def _period(self) -> int:
        return max(self.num_microbatches, self.num_cores)


class TickStage(Protocol):
    """The computation of a core at a tick, with a gradient."""

    def forward(self, now: Tick, x: Leaves) -> Leaves:
        """Returns the activations after the stage, of the same shapes and dtypes."""
        ...

    def zero_sums(self) -> Sums:
        """Returns the sums of weights' gradients before the first tick."""
        ...

    def backward(self, now: Tick, x: Leaves, grad_y: Leaves, sums: Sums) -> tuple[Leaves, Sums]:
        """Returns the gradients of `x` where it has some, and the sums after this tick."""
        ...


class TickLoop:
    """A loop over all ticks of a timetable, on one core per index of the axis `layers`."""

    def __init__(self, lowering: Lowering, timetable: RingTicks) -> None:
        self._lowering, self._timetable = lowering, timetable
        self._num_cores = lowering.mesh.num_stages
        if self._num_cores > 1:
            self._cores = lowering.coordinate(LAYERS_AXIS)
        else:
            self._cores = lowering.raw_map(lambda: tf.constant(0))
        self._is_first = lowering.raw_map(lambda core: tf.equal(core, 0), self._cores)

    def run(
        self,
        stage: Callable[[Tick, Leaves, Any], tuple[Leaves, Any]],
        state: Any,
        buffer: Leaves,
        slots: Leaves = (),
        enter: Callable[[Tick, Any], tuple[Leaves, Any]] | None = None,
        leave: Callable[[Tick, Leaves, Any], Any] | None = None,
        placed: bool = False,
    ) -> tuple[Leaves, Any]:
        """Runs all ticks; returns the slots and the state."""
        # `stage` takes the work and the inputs of each processor, and returns what each sends on.
        # `enter` takes the work of the first core and returns inputs of the first stage, which are
        # ignored at other stages; without it all inputs wait in the slots. `leave` takes the work
        # of the last core and its outputs, on all cores. All take and return the state.
        #
        # `buffer` is zeros like the tensors that stages exchange; `slots` are `[M, ...]` of these,
        # and not needed if `enter` makes all inputs of the first core, which then has one stage.
        # With `placed`, operations without a device are placed beside their inputs.

        def tick(number: tf.Tensor, buffer: Leaves, slots: Leaves, state: Any) -> Any:
            now, first, last = self._now(number)
            inputs = self._each(lambda leaf: leaf[first.microbatch], slots)
            if enter is not None:
                entering, state = enter(first, state)
                if slots:
                    entering = self._each(
                        lambda new, old: tf.where(first.round > 0, old, new), entering, inputs
                    )
                inputs = entering
            x = self._each(
                lambda new, received, is_first: tf.where(is_first, new, received),
                inputs,
                buffer,
                also=[self._is_first],
            )
            y, state = stage(now, x, state)
            sent = tuple(self._shift(leaf, 1, backward=False) for leaf in y)
            if slots:
                slots = self._each(
                    lambda leaf, new: put(leaf, last.microbatch, new, last.busy), slots, sent
                )
            if leave is not None:
                state = leave(last, self._from_last(y), state)
            return number + 1, sent, slots, state

        return self._loop(_placed(tick) if placed else tick, buffer, slots, state)

    def forward(self, stage: TickStage, stream: Leaves) -> tuple[Leaves, Leaves]:
        """Runs microbatches through all stages; returns outputs, and tensors for `backward`.

        `stream` is `[M, ...]`, and so are the outputs: valid on the first cores only.
        """
        stream = self._pinned(stream)

        def saving(now: Tick, x: Leaves, saved: Leaves) -> tuple[Leaves, Leaves]:
            saved = self._each(
                lambda slots, value, number: put(slots, number, value), saved, x, also=[now.number]
            )
            return stage.forward(now, x), saved

        num_ticks = self._timetable.num_ticks
        saved = self._each(
            lambda slots: tf.zeros([num_ticks, *slots.shape[1:]], slots.dtype), stream
        )
        stream, saved = self.run(saving, saved, self._empty_buffer(stream), stream, placed=True)
        return self._on_first(stream), saved

    def backward(self, stage: TickStage, grads: Leaves, saved: Leaves) -> tuple[Leaves, Sums]:
        """Returns the gradients of `stream`, and the sums of the gradients of the weights.

        `grads` has the gradients of the differentiable outputs; both count on first cores only.
        """
        each, is_first = self._each, [self._is_first]
        grads, saved = self._pinned(grads), self._pinned(saved)
        last_tick = self._timetable.num_ticks - 1

        def tick(count: tf.Tensor, buffer: Leaves, slots: Leaves, sums: Sums) -> Any:
            number = last_tick - count
            now, first, last = self._now(number)
            # The last core takes the gradient of what it sent to a slot of the first one.
            sent = each(
                lambda slots, grad, is_first: tf.where(
                    is_first, keep(last.busy, slots[last.microbatch]), grad
                ),
                slots,
                buffer,
                also=is_first,
            )
            slots = each(
                lambda leaf: put(leaf, last.microbatch, tf.zeros_like(leaf[0]), last.busy), slots
            )
            grad_y = tuple(self._shift(leaf, -1, backward=True) for leaf in sent)
            grad_y = each(lambda leaf, busy: keep(busy, leaf), grad_y, also=[now.busy])
            x = each(lambda leaf: leaf[number], saved)
            grad_x, sums = stage.backward(now, x, grad_y, sums)
            grad_x = each(lambda leaf, busy: keep(busy, leaf), grad_x, also=[now.busy])
            at = first.microbatch
            slots = each(
                lambda leaf, grad, is_first: put(leaf, at, leaf[at] + keep(is_first, grad)),
                slots,
                grad_x,
                also=is_first,
            )
            buffer = each(
                lambda grad, is_first: keep(tf.logical_not(is_first), grad), grad_x, also=is_first
            )
            return count + 1, buffer, slots, sums

        slots = self._on_first(grads)
        slots, sums = self._loop(_placed(tick), self._empty_buffer(slots), slots, stage.zero_sums())
        # The slots that were read last hold the gradients of the inputs.
        return self._on_first(slots), sums

    def _pinned(self, leaves: Leaves) -> Leaves:
        """Pins tensors that enter a loop to their devices.

        TensorFlow places a loop's input on the device of the operation that made it. Calls made by
        `attach_gradient` have no device: with workers, all weights would go to the client and back
        at each tick.
        """
        return self._each(tf.identity, leaves)

    def _each(
        self, function: Callable[..., Any], *leaves: Leaves, also: Sequence[Slices] = ()
    ) -> Leaves:
        """Applies a function on each processor to its slices of each leaf, and to `also`."""
        return tuple(
            self._lowering.raw_map(function, *of_leaf, *also)
            for of_leaf in zip(*leaves, strict=True)
        )

    def _loop(self, tick: Callable[..., Any], *state: Any) -> Any:
        num_ticks = self._timetable.num_ticks
        # Eager mode builds every turn, and counts turns itself.
        is_counted = isinstance(num_ticks, int) and not tf.executing_eagerly()
        with self._lowering.costs.repeated(num_ticks if is_counted else 1):
            _, _, slots, state = tf.while_loop(
                lambda number, *_: tf.less(number, num_ticks),
                tick,
                (tf.constant(0), *state),
                # One turn at a time: the collectives of two turns must not overtake each other, and
                # a tick may read a buffer that another one overwrites.
                parallel_iterations=1,
            )
        return slots, state

    def _now(self, number: tf.Tensor) -> tuple[Tick, Tick, Tick]:
        """Returns the work of all processors, of the first core, and of the last core."""
        at = functools.partial(self._timetable.at, number)
        # The function returns several tensors, which types cannot express.
        now: Any = self._lowering.raw_map(at, self._cores)  # pyright: ignore
        return Tick(*zip(*now, strict=True)), at(0), at(self._num_cores - 1)

    def _on_first(self, leaves: Leaves) -> Leaves:
        return self._each(
            lambda leaf, is_first: keep(is_first, leaf), leaves, also=[self._is_first]
        )

    def _empty_buffer(self, stream: Leaves) -> Leaves:
        return self._each(lambda slots: tf.zeros_like(slots[0]), stream)

    def _shift(self, x: Slices, offset: int, backward: bool) -> Slices:
        if self._num_cores == 1:
            return x
        return self._lowering.raw_circle(x, LAYERS_AXIS, offset, backward=backward)

    def _from_last(self, y: Leaves) -> Leaves:
        """Returns the last core's tensors, on all cores."""
        if self._num_cores == 1:
            return y
        last = self._num_cores - 1
        from_last = self._each(
            lambda leaf, core: keep(tf.equal(core, last), leaf), y, also=[self._cores]
        )
        return tuple(
            self._lowering.raw_all_reduce(leaf, [LAYERS_AXIS], "sum") for leaf in from_last
        )


def _placed(tick: Callable[..., Any]) -> Callable[..., Any]:
    def placed(*state: Any) -> Any:
        state = tick(*state)
        if not tf.executing_eagerly():
            place_beside_inputs(tf.compat.v1.get_default_graph())
        return state

    return placed


# The dtypes for which GPUs have a kernel that replaces rows.
_SCATTERED = (tf.float32, tf.float64, tf.int32, tf.int64)


def put(
    slots: tf.Tensor, at: tf.Tensor, value: tf.Tensor, condition: tf.Tensor | None = None
) -> tf.Tensor:
    """Replaces one slot, if the condition is true."""
    if condition is not None:
        value = tf.where(condition, value, slots[at])
    if slots.dtype in _SCATTERED:
        return tf.tensor_scatter_nd_update(slots, [[at]], value[None])
    is_there = tf.equal(tf.range(tf.shape(slots)[0]), at)
    return tf.where(tf.reshape(is_there, [-1, *[1] * (slots.shape.rank - 1)]), value, slots)


def keep(condition: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the value, or zeros if the condition is false; a product would keep NaN."""
    return tf.where(condition, value, tf.zeros_like(value))
