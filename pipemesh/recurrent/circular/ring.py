"""A loop in which groups travel around the cores many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.recurrent.circular.tick_loop import Leaves, keep


class Beat(NamedTuple):
    """The work of a core at a tick: int32 scalars, or `Slices` of these for all processors.

    Attributes:
        turn: number of completed passes through all stages.
        round: the index of the stage among those of the core.
        group: the number of the group.
        busy: bool, whether there is work; if not, the other attributes hold arbitrary valid
            numbers.
    """

    turn: Any
    round: Any
    group: Any
    busy: Any


class Ring:
    """Sends groups through all stages, for a number of turns that is known only at run time.

    At each tick a core applies one of its stages to the tensors from its neighbour and sends the
    result on, as in `TickLoop`. But the results of the last stage determine the next inputs of the
    first one, so all cores read both. A group returns to a core after `max(groups, cores)` ticks.
    That is the schedule `pipemesh.schedule.decode` with one stage for each round of each turn.
    There is no gradient.

    Args:
        lowering: of all tensors; its axis `layers`, if any, has one core per index.
        groups: number of groups.
        rounds: number of stages per core.

    Example:
        >>> from pipemesh.lowering import PlacementLowering
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> lowering = PlacementLowering(Mesh.from_text("layers:2"), LayoutRules(), ["CPU:0"] * 2)
        >>> ring, zero = Ring(lowering, groups=2, rounds=1), tf.zeros([])
        >>> def enter(beat, enters, sums):
        ...     return ((sums[beat.group],) * 2,), sums
        >>> def stage(beat, x, sums):
        ...     return (tuple(part + 1 for part in x[0]),), sums
        >>> def leave(beat, leaves, y, sums):
        ...     new = tf.where(leaves, y[0][0], sums[beat.group])
        ...     return tf.tensor_scatter_nd_update(sums, [[beat.group]], [new])
        >>> run = tf.function(lambda: ring.run(3, enter, stage, leave, tf.constant([0.0, 10.0]),
        ...                                    ((zero, zero),)))
        >>> run().numpy().tolist()
        [6.0, 16.0]
    """

    def __init__(self, lowering: Lowering, groups: int, rounds: int) -> None:
        self._lowering, self._groups, self._rounds = lowering, groups, rounds
        self._num_cores = lowering.mesh.num_stages
        self._period = max(groups, self._num_cores)
        if self._num_cores > 1:
            self._cores = lowering.coordinate(LAYERS_AXIS)
        else:
            self._cores = lowering.raw_map(lambda: tf.constant(0))

    def num_ticks(self, turns: Any) -> Any:
        """Returns the number of ticks until the last group leaves the last stage."""
        return (turns * self._rounds - 1) * self._period + self._groups + self._num_cores - 1

    def at(self, tick: Any, core: Any, turns: Any) -> Beat:
        """Returns the work of a core at a tick (int32 scalars)."""
        there = tick - core
        index = tf.maximum(there, 0)
        passed, group = index // self._period, index % self._period
        turn = passed // self._rounds
        busy = (there >= 0) & (group < self._groups) & (turn < turns)
        return Beat(turn, passed % self._rounds, tf.minimum(group, self._groups - 1), busy)

    def run(
        self,
        turns: Any,
        enter: Callable[[Beat, tf.Tensor, Any], tuple[Leaves, Any]],
        stage: Callable[[Beat, Leaves, Any], tuple[Leaves, Any]],
        leave: Callable[[Beat, tf.Tensor, Leaves, Any], Any],
        state: Any,
        like: Leaves,
    ) -> Any:
        """Runs all turns and returns the final state.

        Args:
            turns: int32 scalar, the number of turns, at least 1.
            enter: takes the next group of the first core, whether that is at the first stage, and
                the state; returns the inputs of the first stage, and the state. The inputs are
                ignored if the group is not at the first stage.
            stage: takes the work of each processor, its inputs, and the state; returns the tensors
                that each sends on, and the state. Tensors of an idle processor are ignored.
            leave: takes the group of the last core, whether that was the last stage, its outputs
                (equal along the axis `layers`), and the state; returns the state.
            state: nested tensors.
            like: example tensors with the shapes and dtypes that stages exchange.

        Returns:
            The final state.
        """
        each, last = self._lowering.raw_map, self._num_cores - 1
        is_first = each(lambda core: tf.equal(core, 0), self._cores)
        is_last = each(lambda core: tf.equal(core, last), self._cores)
        buffer = tuple(each(tf.zeros_like, leaf) for leaf in like)
        # Returned tensors, until their group is due at the first core.
        stream = () if self._rounds == 1 else tuple(each(self._slots, leaf) for leaf in like)

        def tick(number: tf.Tensor, buffer: Leaves, stream: Leaves, state: Any) -> Any:
            first, behind = (self.at(number, core, turns) for core in (0, last))
            beats = [
                each(lambda c, f=f: self.at(number, c, turns)[f], self._cores) for f in _FIELDS
            ]
            given, state = enter(first, first.busy & tf.equal(first.round, 0), state)
            if stream:
                given = tuple(
                    each(
                        lambda new, slots: tf.where(first.round > 0, slots[first.group], new), *pair
                    )
                    for pair in zip(given, stream, strict=True)
                )
            x = tuple(each(tf.where, is_first, *pair) for pair in zip(given, buffer, strict=True))
            y, state = stage(Beat(*beats), x, state)
            sent = y if not last else tuple(self._circle(leaf) for leaf in y)
            if stream:
                stream = tuple(
                    each(
                        lambda slots, new: tf.tensor_scatter_nd_update(
                            slots,
                            [[behind.group]],
                            [tf.where(behind.busy, new, slots[behind.group])],
                        ),
                        *pair,
                    )
                    for pair in zip(stream, sent, strict=True)
                )
            state = leave(
                behind,
                behind.busy & tf.equal(behind.round, self._rounds - 1),
                y if not last else tuple(self._from_last(leaf, is_last) for leaf in y),
                state,
            )
            return number + 1, sent, stream, state

        *_, state = tf.while_loop(
            lambda number, *_: number < self.num_ticks(turns),
            tick,
            (tf.constant(0), buffer, stream, state),
            # One tick at a time: collectives must not overtake each other, and a tick may read a
            # buffer that another one overwrites.
            parallel_iterations=1,
        )
        return state

    def _slots(self, like: tf.Tensor) -> tf.Tensor:
        return tf.zeros([self._groups, *like.shape], like.dtype)

    def _circle(self, leaf: Slices) -> Slices:
        return self._lowering.raw_circle(leaf, LAYERS_AXIS, 1, backward=False)

    def _from_last(self, leaf: Slices, is_last: Slices) -> Slices:
        only = self._lowering.raw_map(keep, is_last, leaf)
        return self._lowering.raw_all_reduce(only, [LAYERS_AXIS], "sum")


_FIELDS = range(len(Beat._fields))
