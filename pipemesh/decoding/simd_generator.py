"""The graphs of decoding if all devices run one program: a ring of stages, tick by tick."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import no_gradients
from pipemesh.decoding.choice import Chooser
from pipemesh.decoding.group import Group, rows_of
from pipemesh.errors import DecodingError
from pipemesh.layers.mesh_cluster import mesh_devices
from pipemesh.layers.pipeline.simd_ring import SimdRing
from pipemesh.recurrent.circular.ring import Beat


class SimdGenerator:
    """The graphs that compute tokens for a stack with `lowering="simd"`.

    It does the work of a `Generator` in one loop over ticks. At each tick every core applies its
    stage to another group. Then all cores choose the token of the group that has left the last
    stage.

    Args:
        task: a lingvo task with `DecodeArgs`.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: the positions of a row.
        chooser: chooses tokens.
        stop: ids that end a continuation.

    Attributes:
        chooser: chooses tokens.
        stop: ids that end a continuation.
        multiple: the number of prompts of a group must be a multiple of it.
    """

    def __init__(
        self,
        task: Any,
        stack: Any,
        cluster: Callable[[], Any],
        length: int,
        chooser: Chooser,
        stop: Collection[int] = (),
    ) -> None:
        self._task, self._stack, self._cluster = task, stack, cluster
        self._length, self.chooser, self.stop = length, chooser, frozenset(stop)
        mesh, axis = stack.simd.pipeline.mesh, stack.simd.rules.axis("batch")
        self.multiple = 1 if axis is None else mesh.size(axis)
        self._begin = tf.function(self._begin_groups, autograph=False)
        self._go_on = tf.function(self._go_on_groups, autograph=False)

    def begin(
        self, numbers: Sequence[int], prompts: Sequence[Any], before: Sequence[Group | None]
    ) -> list[tuple[Group, tuple[tf.Tensor, ...]]]:
        """Reads prompts, and chooses the token after each; see `Generator.begin`.

        Args:
            numbers: the numbers of the groups.
            prompts: for each group ids, lengths and seeds.
            before: the previous groups; None for new ones.

        Returns:
            For each group its new state, and the results that its rows take; their first dim is
            prompts.

        Raises:
            DecodingError: the layout's split of the batch does not divide the prompts.
        """
        rows = len(prompts[0][0])
        if rows % self.multiple:
            raise DecodingError(
                f"a group of {rows} prompts cannot be split {self.multiple} ways, as the layout "
                f"'{self._stack.simd.rules}' splits a batch; give --rows as a multiple of it"
            )
        return self._begin(list(prompts), list(before))

    def go_on(
        self, groups: Sequence[Group], steps: int | tf.Tensor
    ) -> tuple[list[Group], list[Any]]:
        """Chooses tokens, one after the other; see `Generator.go_on`.

        Args:
            groups: all groups.
            steps: the number of tokens.

        Returns:
            The groups, and for each the results that its rows take; their first dims are steps and
            prompts.
        """
        return self._go_on(list(groups), tf.convert_to_tensor(steps))

    def _ring(self) -> SimdRing:
        stack, simd = self._stack, self._stack.simd
        devices = mesh_devices(stack.cluster, simd.pipeline.mesh, stack.params)
        return SimdRing(simd, stack.theta, devices, self._length, self._task.DecodeArgs)

    def _begin_groups(self, prompts: list[Any], before: list[Group | None]) -> Any:
        with self._cluster(), no_gradients():
            ring, number = self._ring(), len(prompts)
            ids, lengths, seeds = (tf.stack(parts) for parts in zip(*prompts, strict=True))
            _, rows, most = ids.shape
            places = tf.tile(tf.range(most)[None], [rows, 1])
            last = tf.maximum(lengths - 1, 0)
            # The last element is for results that are discarded.
            kept, logits = ring.run(
                1,
                lambda group, _: (ids[group], places, last[group]),
                lambda beat, leaves, logits, found: (
                    found.write(tf.where(leaves, beat.group, number), logits),
                    None,
                ),
                None,
                number,
                (rows, most),
                tf.TensorArray(tf.float32, number + 1, clear_after_read=False),
            )
            logits = logits.gather(tf.range(number))
            return [
                self._begun(ring, logits[i], lengths[i], seeds[i], kept[i], before[i])
                for i in range(number)
            ]

    def _begun(
        self,
        ring: SimdRing,
        logits: tf.Tensor,
        lengths: tf.Tensor,
        seeds: tf.Tensor,
        kept: Any,
        before: Group | None,
    ) -> tuple[Group, tuple[tf.Tensor, ...]]:
        choice = self.chooser.begin(logits, seeds, self.stop)
        lengths = tf.repeat(lengths, self.chooser.width)
        if choice.parents is not None:
            kept = ring.followed(kept, choice.parents)
        after = Group(choice.ids, lengths, choice.state, kept)
        if before is not None:
            new = lengths > 0
            after = Group(
                rows_of(new, after.tokens, before.tokens),
                rows_of(new, after.places, before.places),
                rows_of(new, after.state, before.state),
                ring.merged(new, kept, before.kept),
            )
        return after, choice.results

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster(), no_gradients():
            ring, number = self._ring(), len(groups)
            tokens, places, states = (
                tf.stack([group[i] for group in groups]) for i in range(len(Group._fields) - 1)
            )
            rows = tokens.shape[1]
            last = tf.zeros([rows], tf.int32)

            def now(group: tf.Tensor, state: Any) -> Any:
                # A complete row continues until the next check; it never moves beyond its end.
                position = tf.minimum(state[1][group], self._length - 1)
                return state[0][group][:, None], position[:, None], last

            def chosen(beat: Beat, leaves: tf.Tensor, logits: tf.Tensor, state: Any) -> Any:
                tokens, places, states, arrays = state
                group = beat.group
                choice = self.chooser.choose(logits, states[group], self.stop)

                def put(slots: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
                    value = tf.where(leaves, value, slots[group])
                    return tf.tensor_scatter_nd_update(slots, [[group]], [value])

                index = tf.where(leaves, beat.turn * number + group, steps * number)
                arrays = tuple(
                    array.write(index, value)
                    for array, value in zip(arrays, choice.results, strict=True)
                )
                new = put(tokens, choice.ids), put(places, places[group] + 1)
                return (*new, put(states, choice.state), arrays), choice.parents

            arrays = tuple(
                tf.TensorArray(dtype, steps * number + 1, clear_after_read=False)
                for dtype in self.chooser.result_types
            )
            kept, (tokens, places, states, arrays) = ring.run(
                steps,
                now,
                chosen,
                [group.kept for group in groups],
                number,
                (rows, 1),
                (tokens, places, states, arrays),
            )
            after = [Group(tokens[i], places[i], states[i], kept[i]) for i in range(number)]
            results = [
                tuple(array.gather(tf.range(steps) * number + i) for array in arrays)
                for i in range(number)
            ]
            return after, results
