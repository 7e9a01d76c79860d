"""The graphs of decoding: prompts go in, tokens come out, group by group through the stages.

A group of rows is a microbatch. In a step of the loop each group gets a token: it passes all stages
one after the other. The token chosen after the last stage is the input of the first stage in the
next step. Groups are independent, but each stage takes them in turn. So while one group is at a
stage, another is at the next stage, also across steps of the loop. `pipemesh.schedule.decode` is
the schedule.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.gradients import no_gradients
from pipemesh.backend.operations import copied, pin, pin_present
from pipemesh.decoding.beam import Chooser
from pipemesh.decoding.choice import Choice
from pipemesh.errors import DecodingError
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.mesh_cluster import mesh_devices
from pipemesh.layers.named import KeyValueCache, cache_scope
from pipemesh.layers.pipeline.simd_ring import SimdRing
from pipemesh.layers.pipeline.weights import plain_theta
from pipemesh.recurrent.circular.tick_loop import Tick, put

# Number of loop steps that may run at the same time.
_STEPS_AT_ONCE = 4


class Group(NamedTuple):
    """The state of a group's rows, all on their devices.

    Attributes:
        tokens: `[rows]` int32, the last tokens, which have not passed the stages yet.
        places: `[rows]` int32, the positions of these tokens.
        state: the tensor that the next choice depends on.
        kept: the caches of the stages, in the generator's form.
    """

    tokens: tf.Tensor
    places: tf.Tensor
    state: tf.Tensor
    kept: Any


class _StageCaches:
    """The caches of stages on devices of their own: nested tensors whose first dim is rows."""

    def followed(self, kept: Any, parents: tf.Tensor) -> Any:
        """Returns the caches of rows that continue the rows `parents`."""
        return _beside(lambda cache: tf.gather(cache, parents), kept)

    def merged(self, new: tf.Tensor, kept: Any, before: Any) -> Any:
        """Returns the rows of `kept` where `new` is true, else those of `before`."""

        def rows(kept: tf.Tensor, before: tf.Tensor) -> tf.Tensor:
            return tf.where(tf.reshape(new, [-1] + [1] * (kept.shape.rank - 1)), kept, before)

        return _beside(rows, kept, before)


class Generator:
    """The graphs that compute tokens, for stages on devices of their own.

    Args:
        task: a lingvo task with `DecodeArgs(ids, places)`; if prompts have a source, with
            `DecodeArgs(ids, places, source)`, too, where a source ends with -1.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: the positions of a row.
        chooser: chooses tokens.
        stop: ids that end a continuation.

    Attributes:
        chooser: chooses tokens.
        stop: ids that end a continuation.
        multiple: the number of prompts of a group must be a multiple of it. It is 1, because each
            replica has its own groups.
    """

    multiple = 1
    _caches = _StageCaches()

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
        self.num_replicas = 1
        self._prepare()
        self._begin = tf.function(self._begin_groups, autograph=False)
        self._go_on = tf.function(self._go_on_groups, autograph=False)

    def begin(
        self, numbers: Sequence[int], prompts: Sequence[Any], before: Sequence[Group | None]
    ) -> list[tuple[Group, tuple[tf.Tensor, ...]]]:
        """Reads prompts, and chooses the token after each.

        Args:
            numbers: the numbers of the groups.
            prompts: for each group ids `[prompts, length]`, lengths `[prompts]` (0 for a row that
                continues unchanged), seeds `[prompts, 2]`, and, for a model that reads one, the
                source `[prompts, source length]`, all int32.
            before: the previous groups; None for new ones.

        Returns:
            For each group its new state, and the results that its rows take; their first dim is
            prompts.

        Raises:
            DecodingError: the layout's split of the batch does not divide the prompts.
        """
        # The graph depends only on the replica of each group.
        replicas = tuple(number % self.num_replicas for number in numbers)
        return self._begin(replicas, list(prompts), list(before))

    def go_on(
        self, groups: Sequence[Group], steps: int | tf.Tensor
    ) -> tuple[list[Group], list[Any]]:
        """Chooses `steps` tokens for each row of all groups, one after the other.

        Returns:
            The groups, and for each the results that its rows take; their first dims are steps and
            prompts.
        """
        return self._go_on(list(groups), tf.convert_to_tensor(steps))

    def _prepare(self) -> None:
        with self._cluster():
            homes = self._stack.StageHomes()
            self.num_replicas = homes[0].num_replicas
            # The first device of each replica of each stage, stage by stage.
            self._devices = [
                home.replica(number)[0] for home in homes for number in range(self.num_replicas)
            ]

    def _theta(self) -> Any:
        stack = self._stack
        return plain_theta(stack, stack.theta, stack.stage_names)

    def _gates(self) -> list[tf.Tensor]:
        """Returns a gate for each device: a scalar, computed when the device is free."""
        gates = []
        for device in self._devices:
            with tf.device(device):
                gates.append(tf.zeros([], tf.int32))
        return gates

    def _through(
        self,
        gates: list[tf.Tensor],
        theta: Any,
        number: int,
        ids: Any,
        places: Any,
        last: Any,
        kept: Any,
        *source: Any,
    ) -> tuple[tf.Tensor, list[Any]]:
        """Passes tokens of a group through all stages; returns logits and caches.

        Gates hold the group back at a stage until the previous group has left it; those in the list
        become its own. Without gates TensorFlow would start every ready operation. Two groups at
        one stage share its device, and both would leave it late.
        """
        # Prefill overwrites earlier caches.
        args, after = to_tuple(self._task.DecodeArgs(ids, places, *source)), []
        replica = number % self.num_replicas
        for stage in range(len(self._stack.stage_names)):
            before = kept[stage] if kept else None
            device = stage * self.num_replicas + replica
            with tf.control_dependencies([gates[device]]):
                args = tf.nest.pack_sequence_as(args, pin_present(tf.nest.flatten(args)))
            cache = KeyValueCache(self._length, places, before, last, overwrites=bool(kept))
            with cache_scope(cache):
                outputs = self._stack.FPropStage(theta, stage, *args, replica=replica)
            args = to_tuple(outputs)
            done = [output for output in tf.nest.flatten(args) if output is not None]
            with tf.control_dependencies(done), tf.device(gates[device].device):
                (gates[device],) = pin([gates[device]])
            after.append(cache.kept)
        return args[0], after

    def _begin_groups(self, numbers: tuple[int, ...], prompts: Any, before: Any) -> Any:
        # Gradients stay, although nothing differentiates here. Removing their operations makes
        # prefill of two groups 1.4 times slower; the cause is unknown.
        with self._cluster():
            theta, gates, begun = self._theta(), self._gates(), []
            for number, prompt, group in zip(numbers, prompts, before, strict=True):
                ids, lengths, seeds, *source = prompt
                rows, most = ids.shape
                places = tf.tile(tf.range(most)[None], [rows, 1])
                last = tf.maximum(lengths - 1, 0)
                logits, kept = self._through(gates, theta, number, ids, places, last, None, *source)
                begun.append(self._begun(logits, lengths, seeds, kept, group, self._caches))
            return begun

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster(), no_gradients():
            theta = self._theta()
            # Copy the caller's caches once, instead of for each token.
            groups = [group._replace(kept=_beside(copied, group.kept)) for group in groups]
            arrays = [
                [tf.TensorArray(dtype, steps) for dtype in self.chooser.result_types]
                for _ in groups
            ]

            def body(step: tf.Tensor, gates: Any, groups: Any, arrays: Any) -> Any:
                gates = list(gates)
                results = [
                    self._step(gates, theta, number, group) for number, group in enumerate(groups)
                ]
                written = [
                    [a.write(step, value) for a, value in zip(group_arrays, values, strict=True)]
                    for group_arrays, (_, values) in zip(arrays, results, strict=True)
                ]
                return step + 1, gates, [group for group, _ in results], written

            _, _, groups, arrays = tf.while_loop(
                lambda step, *_: step < steps,
                body,
                (tf.constant(0), self._gates(), groups, arrays),
                parallel_iterations=_STEPS_AT_ONCE,
            )
            return groups, [tuple(array.stack() for array in group) for group in arrays]

    def _step(self, gates: list[tf.Tensor], theta: Any, number: int, group: Group) -> Any:
        # A complete row continues until the next check; it never moves beyond its last position.
        places = tf.minimum(group.places, self._length - 1)
        last = tf.zeros_like(places)
        ids = group.tokens[:, None]
        logits, kept = self._through(gates, theta, number, ids, places[:, None], last, group.kept)
        with tf.device(logits.device):
            choice = self.chooser.choose(logits, group.state, self.stop)
        return _after(choice, group.places + 1, kept, self._caches), choice.results

    def _begun(
        self,
        logits: tf.Tensor,
        lengths: tf.Tensor,
        seeds: tf.Tensor,
        kept: Any,
        before: Group | None,
        caches: _StageCaches | SimdRing,
    ) -> tuple[Group, tuple[tf.Tensor, ...]]:
        """Chooses the first tokens of new rows; rows without a prompt stay as they were."""
        with tf.device(logits.device):
            choice = self.chooser.begin(logits, seeds, self.stop)
        lengths = tf.repeat(lengths, self.chooser.width)
        after = _after(choice, lengths, kept, caches)
        if before is not None:
            new = lengths > 0
            tokens, places, state = _StageCaches().merged(new, after[:3], before[:3])
            after = Group(tokens, places, state, caches.merged(new, after.kept, before.kept))
        return after, choice.results


class SimdGenerator(Generator):
    """The graphs that compute tokens for a stack with `lowering="simd"`.

    It does the work of a `Generator` in one loop over ticks. At each tick every core applies its
    stage to another group. Then all cores choose the token of the group that has left the last
    stage. Its arguments are those of a `Generator`.
    """

    def _prepare(self) -> None:
        mesh, axis = self._stack.simd.pipeline.mesh, self._stack.simd.rules.axis("batch")
        self.multiple = 1 if axis is None else mesh.size(axis)

    def begin(
        self, numbers: Sequence[int], prompts: Sequence[Any], before: Sequence[Group | None]
    ) -> list[tuple[Group, tuple[tf.Tensor, ...]]]:
        """Reads prompts, and chooses the token after each; see `Generator.begin`."""
        rows = len(prompts[0][0])
        if rows % self.multiple:
            raise DecodingError(
                f"a group of {rows} prompts cannot be split {self.multiple} ways, as the layout "
                f"'{self._stack.simd.rules}' splits a batch; give --rows as a multiple of it"
            )
        return super().begin(numbers, prompts, before)

    def _ring(self) -> SimdRing:
        stack, simd = self._stack, self._stack.simd
        devices = mesh_devices(stack.cluster, simd.pipeline.mesh, stack.params)
        return SimdRing(simd, stack.theta, devices, self._length, self._task.DecodeArgs)

    def _begin_groups(self, numbers: tuple[int, ...], prompts: Any, before: Any) -> Any:
        with self._cluster(), no_gradients():
            ring, number = self._ring(), len(numbers)
            ids, lengths, seeds = (tf.stack(parts) for parts in zip(*prompts, strict=True))
            _, rows, most = ids.shape
            places = tf.tile(tf.range(most)[None], [rows, 1])
            ends = tf.maximum(lengths - 1, 0)
            # The last element is for results that are discarded.
            kept, logits = ring.run(
                1,
                lambda group, _: (ids[group], places, ends[group]),
                lambda last, leaves, logits, written: (
                    written.write(tf.where(leaves, last.microbatch, number), logits),
                    None,
                ),
                None,
                number,
                (rows, most),
                tf.TensorArray(tf.float32, number + 1, clear_after_read=False),
            )
            logits = logits.gather(tf.range(number))
            return [
                self._begun(logits[i], lengths[i], seeds[i], kept[i], before[i], ring)
                for i in range(number)
            ]

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster(), no_gradients():
            ring, number = self._ring(), len(groups)
            tokens, places, states = (
                tf.stack([group[i] for group in groups]) for i in range(len(Group._fields) - 1)
            )
            rows = tokens.shape[1]
            ends = tf.zeros([rows], tf.int32)

            def now(group: tf.Tensor, state: Any) -> Any:
                # A complete row continues until the next check; it never moves beyond its end.
                position = tf.minimum(state[1][group], self._length - 1)
                return state[0][group][:, None], position[:, None], ends

            def chosen(last: Tick, leaves: tf.Tensor, logits: tf.Tensor, state: Any) -> Any:
                tokens, places, states, arrays = state
                group = last.microbatch
                choice = self.chooser.choose(logits, states[group], self.stop)

                index = tf.where(leaves, last.turn * number + group, steps * number)
                arrays = tuple(
                    array.write(index, value)
                    for array, value in zip(arrays, choice.results, strict=True)
                )
                new = choice.ids, places[group] + 1, choice.state
                slots = [
                    put(slots, group, value, leaves)
                    for slots, value in zip((tokens, places, states), new, strict=True)
                ]
                return (*slots, arrays), choice.parents

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


def generator_of(
    trained: Any, length: int, chooser: Chooser, stop: Collection[int] = ()
) -> Generator:
    """Returns the generator for a `TrainedTask`; the other arguments are those of `Generator`.

    Returns:
        A `SimdGenerator` if its first stack has `lowering="simd"`, else a `Generator`.
    """
    stack = trained.pipelines[0]
    kind = Generator if stack.simd is None else SimdGenerator
    cluster = functools.partial(trained.cluster, do_eval=True)
    return kind(trained.task, stack, cluster, length, chooser, stop)


def _after(choice: Choice, places: tf.Tensor, kept: Any, caches: _StageCaches | SimdRing) -> Group:
    """Returns a group after a choice. The rows of a prompt have the same position."""
    if choice.parents is not None:
        kept = caches.followed(kept, choice.parents)
    return Group(choice.ids, places, choice.state, kept)


def _beside(function: Callable[..., tf.Tensor], *values: Any) -> Any:
    """Applies a function to tensors of values that are nested alike, on the first one's device."""

    def compute(*tensors: tf.Tensor) -> tf.Tensor:
        with tf.device(tensors[0].device):
            return function(*tensors)

    return tf.nest.map_structure(compute, *values)
