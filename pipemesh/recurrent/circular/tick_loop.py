"""The loop over ticks, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import tensorflow as tf

from pipemesh.backend.devices import place_beside_inputs
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.simulate import lockstep

# For each tensor of the activations its slices.
Leaves = tuple[Slices, ...]
# Sums of the gradients of weights: for each weight its slices, or for each stage its weights.
Sums = tuple[Slices, ...]


@dataclasses.dataclass(frozen=True)
class Tick:
    """The work of all processors at one tick, as `Slices` with a value for each.

    Attributes:
        stages: the number of the stage; int32 like the next two.
        rounds: the index of the stage among those of the core.
        microbatches: the number of the microbatch.
        busy: whether there is work; if not, the numbers are 0.
        read_slot: the slot that the first core takes its input from.
        write_slot: the slot where it puts the tensor from the last core.
        writes: whether the last core sends a tensor.
    """

    stages: Slices
    rounds: Slices
    microbatches: Slices
    busy: Slices
    read_slot: tf.Tensor
    write_slot: tf.Tensor
    writes: tf.Tensor


class TickStage(Protocol):
    """The computation of a core at a tick."""

    def forward(self, now: Tick, x: Leaves, weights: Sequence[Slices]) -> Leaves:
        """Returns the activations after the stage, of the same shapes and dtypes."""
        ...

    def zero_sums(self, weights: Sequence[Slices]) -> Sums:
        """Returns the sums of weights' gradients before the first tick."""
        ...

    def backward(
        self,
        now: Tick,
        x: Leaves,
        weights: Sequence[Slices],
        grad_y: Leaves,
        sums: Sums,
    ) -> tuple[Leaves, Sums]:
        """Returns the gradients of `x` where it has some, and the sums after this tick."""
        ...


class TickLoop:
    """A loop over all ticks of a pipeline, in the order of a schedule.

    The state of a core is the tensor from its neighbour (`buffer`) and a slot for each microbatch
    (`stream`). At first the slots hold the inputs, and the first core takes one at each tick. The
    tensor that leaves the last core goes to a slot of the first core, as input of its next stage or
    as output. The slots of the other cores are unused. The forward loop saves the input of each
    tick. The backward loop recomputes each stage and sends gradients in the other direction.
    `where` keeps results of ticks without work, even NaN, out of results and gradients.

    Args:
        schedule: all forward passes, then all backward passes in the reverse order.
        lowering: of all tensors.
        stage: the computation of a core.
        differentiable: for each tensor of the activations whether it has a gradient.
    """

    def __init__(
        self,
        schedule: Schedule,
        lowering: Lowering,
        stage: TickStage,
        differentiable: Sequence[bool] = (True,),
    ) -> None:
        self._num_cores = schedule.num_devices
        self._lowering = lowering
        self._stage = stage
        self._differentiable = tuple(differentiable)
        forward = lockstep(schedule.only_forward())
        self._num_ticks = len(forward[0])
        # For both directions: stage, microbatch and busy flag of each core at each tick.
        whole = lockstep(schedule)
        self._tables = [
            np.array([[_entry(a) for a in row] for row in rows], np.int32)
            for rows in (forward, [row[self._num_ticks :] for row in whole])
        ]
        if self._num_cores > 1:
            cores = lowering.coordinate(LAYERS_AXIS)
        else:
            cores = lowering.raw_map(lambda: tf.constant(0))
        self._cores = cores
        self._is_first = lowering.raw_map(lambda core: tf.equal(core, 0), cores)

    def forward(self, stream: Leaves, weights: Sequence[Slices]) -> tuple[Leaves, Leaves]:
        """Runs the stages.

        Args:
            stream: `[M, ...]`, the microbatches; used on the first cores only.
            weights: slices of each weight.

        Returns:
            The outputs, shaped like `stream`, on the first cores, zeros elsewhere; and the saved
            tensors for `backward`.
        """
        each = self._lowering.raw_map
        stream, weights = self._pinned(stream), self._pinned(weights)

        def tick(number: tf.Tensor, buffer: Leaves, stream: Leaves, saved: Leaves) -> Any:
            now = self._at(0, number)
            x = tuple(
                each(
                    lambda first, slots, sent: tf.where(first, slots[now.read_slot], sent),
                    self._is_first,
                    *pair,
                )
                for pair in zip(stream, buffer, strict=True)
            )
            saved = tuple(
                each(lambda slots, value: _put(slots, number, value), *pair)
                for pair in zip(saved, x, strict=True)
            )
            y = self._stage.forward(now, x, weights)
            sent = tuple(self._shift(leaf, 1, backward=False) for leaf in y)
            stream = tuple(
                each(
                    lambda slots, value: _put(
                        slots,
                        now.write_slot,
                        tf.where(now.writes, value, slots[now.write_slot]),
                    ),
                    *pair,
                )
                for pair in zip(stream, sent, strict=True)
            )
            return number + 1, sent, stream, saved

        buffer = self._empty_buffer(stream)
        saved = tuple(
            each(lambda slots: tf.zeros([self._num_ticks, *slots.shape[1:]], slots.dtype), leaf)
            for leaf in stream
        )
        _, _, stream, saved = self._run(tick, (tf.constant(0), buffer, stream, saved))
        return tuple(each(keep, self._is_first, leaf) for leaf in stream), saved

    def backward(
        self, grads: Leaves, saved: Leaves, weights: Sequence[Slices]
    ) -> tuple[Leaves, Sums]:
        """Runs the ticks of the backward pass.

        Args:
            grads: of the differentiable outputs; only those of the first cores are used.
            saved: from `forward`.
            weights: slices of each weight.

        Returns:
            The gradients of `stream`, on the first cores, zeros elsewhere, and the sums of the
            gradients of the weights.
        """
        each = self._lowering.raw_map
        grads, saved, weights = map(self._pinned, (grads, saved, weights))
        last = self._num_ticks - 1

        def tick(
            number: tf.Tensor, buffer: Leaves, stream: Leaves, sums: Sums
        ) -> tuple[tf.Tensor, Leaves, Leaves, Sums]:
            now = self._at(1, number)
            sent = tuple(
                each(
                    lambda first, slots, grad: tf.where(
                        first, keep(now.writes, slots[now.write_slot]), grad
                    ),
                    self._is_first,
                    *pair,
                )
                for pair in zip(stream, buffer, strict=True)
            )
            stream = tuple(
                each(
                    lambda slots: _put(
                        slots,
                        now.write_slot,
                        keep(tf.logical_not(now.writes), slots[now.write_slot]),
                    ),
                    leaf,
                )
                for leaf in stream
            )
            grad_y = tuple(
                each(keep, now.busy, self._shift(leaf, -1, backward=True)) for leaf in sent
            )
            # The backward pass runs the same ticks in the reverse order.
            x = tuple(each(lambda slots: slots[last - number], leaf) for leaf in saved)
            grad_x, sums = self._stage.backward(now, x, weights, grad_y, sums)
            grad_x = tuple(each(keep, now.busy, leaf) for leaf in grad_x)
            stream = tuple(
                each(
                    lambda slots, grad, first: _put(
                        slots, now.read_slot, slots[now.read_slot] + keep(first, grad)
                    ),
                    *pair,
                    self._is_first,
                )
                for pair in zip(stream, grad_x, strict=True)
            )
            buffer = tuple(
                each(lambda first, grad: keep(tf.logical_not(first), grad), self._is_first, leaf)
                for leaf in grad_x
            )
            return number + 1, buffer, stream, sums

        stream = tuple(each(keep, self._is_first, leaf) for leaf in grads)
        buffer = self._empty_buffer(stream)
        state = (tf.constant(0), buffer, stream, self._stage.zero_sums(weights))
        _, _, stream, sums = self._run(tick, state)
        # The slots that were read last hold the gradients of the inputs.
        return tuple(each(keep, self._is_first, leaf) for leaf in stream), sums

    def _empty_buffer(self, stream: Leaves) -> Leaves:
        return tuple(
            self._lowering.raw_map(lambda slots: tf.zeros_like(slots[0]), leaf) for leaf in stream
        )

    def _pinned(self, leaves: Sequence[Slices]) -> Leaves:
        """Pins the tensors that enter a loop to their devices.

        TensorFlow places a loop's input on the device of the operation that made it. Calls made by
        `attach_gradient` have no device: with workers, all weights would go to the client and back
        at each tick.
        """
        return tuple(self._lowering.raw_map(tf.identity, leaf) for leaf in leaves)

    def _run(self, tick: Callable[..., Any], state: tuple[Any, ...]) -> Any:
        def placed(*state: Any) -> Any:
            state = tick(*state)
            if not tf.executing_eagerly():
                place_beside_inputs(tf.compat.v1.get_default_graph())
            return state

        # Eager mode builds every turn, and counts turns itself.
        with self._lowering.costs.repeated(1 if tf.executing_eagerly() else self._num_ticks):
            # One turn at a time: the collectives of two turns must not overtake each other.
            return tf.while_loop(
                lambda number, *_: tf.less(number, self._num_ticks),
                placed,
                state,
                parallel_iterations=1,
            )

    def _at(self, direction: int, number: tf.Tensor) -> Tick:
        """Looks up a tick in the schedule."""
        table = self._tables[direction]
        # The microbatch and whether there is one, for the read of the first core and the send of
        # the last.
        reads, sends = (tf.constant(table[core, :, 1:]) for core in (0, -1))
        entries = self._lowering.raw_map(
            lambda core: tf.gather(tf.constant(table), core)[number], self._cores
        )
        stages = self._lowering.raw_map(lambda entry: entry[0], entries)
        return Tick(
            stages=stages,
            rounds=self._lowering.raw_map(lambda stage: stage // self._num_cores, stages),
            microbatches=self._lowering.raw_map(lambda entry: entry[1], entries),
            busy=self._lowering.raw_map(lambda entry: tf.equal(entry[2], 1), entries),
            read_slot=reads[number, 0],
            write_slot=sends[number, 0],
            writes=tf.equal(sends[number, 1], 1),
        )

    def _shift(self, x: Slices, offset: int, backward: bool) -> Slices:
        if self._num_cores == 1:
            return x
        return self._lowering.raw_circle(x, LAYERS_AXIS, offset, backward=backward)


def _entry(action: Action | None) -> tuple[int, int, int]:
    return (0, 0, 0) if action is None else (action.stage, action.microbatch, 1)


def _put(slots: tf.Tensor, at: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Replaces one slot."""
    return tf.tensor_scatter_nd_update(slots, [[at]], value[None])


def keep(condition: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
    """Returns the value, or zeros if the condition is false; a product would keep NaN."""
    return tf.where(condition, value, tf.zeros_like(value))
