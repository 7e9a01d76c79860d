"""The graphs of decoding: prompts go in, tokens come out, group by group through the stages.

A group of rows is a microbatch. In a step of the loop each group gets a token: it passes all stages
one after the other. The token chosen after the last stage is the input of the first stage in the
next step. Groups are independent, but each stage takes them in turn. So while one group is at a
stage, another is at the next stage, also across steps of the loop. `pipemesh.schedule.decode` is
the schedule.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from pipemesh.backend.gradients import no_gradients
from pipemesh.backend.operations import pin
from pipemesh.decoding.choice import Choice, Chooser
from pipemesh.errors import DecodingError
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.mesh_cluster import mesh_devices
from pipemesh.layers.named import KeyValueCache, cache_scope
from pipemesh.layers.pipeline.simd_ring import SimdRing
from pipemesh.layers.pipeline.weights import plain_theta
from pipemesh.recurrent.circular.tick_loop import Tick

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


class Turns:
    """Gates that hold groups back at a stage until the previous group has left it."""

    # Without gates TensorFlow would start every ready operation. Two groups at one stage share its
    # device, and both would leave it late. `gates` has one scalar per device, computed when the
    # previous group has left.

    def __init__(self, gates: Sequence[tf.Tensor]) -> None:
        self.gates = list(gates)

    @classmethod
    def free(cls, devices: Sequence[str]) -> Turns:
        """Returns turns in which all devices, one for each replica of each stage, are free."""
        gates = []
        for device in devices:
            with tf.device(device):
                gates.append(tf.zeros([], tf.int32))
        return cls(gates)

    def enter(self, device: int, values: Any) -> Any:
        """Returns the inputs of a stage, available when its device is free."""
        with tf.control_dependencies([self.gates[device]]):
            return tf.nest.pack_sequence_as(values, pin(tf.nest.flatten(values)))

    def leave(self, device: int, values: Any) -> None:
        """Records the results that make a device free again."""
        gate = self.gates[device]
        with tf.control_dependencies(tf.nest.flatten(values)), tf.device(gate.device):
            (self.gates[device],) = pin([gate])


class _Caches(Protocol):
    """The operations on the caches of a group."""

    def followed(self, kept: Any, parents: tf.Tensor) -> Any:
        """Returns the caches of rows that continue the rows `parents`."""
        ...

    def merged(self, new: tf.Tensor, kept: Any, before: Any) -> Any:
        """Returns the rows of `kept` where `new` is true, else those of `before`."""
        ...


class _StageCaches:
    """The caches of stages on devices of their own: nested tensors whose first dim is rows."""

    def followed(self, kept: Any, parents: tf.Tensor) -> Any:
        """Gathers rows."""
        return tf.nest.map_structure(
            lambda cache: _beside(cache, lambda: tf.gather(cache, parents)), kept
        )

    def merged(self, new: tf.Tensor, kept: Any, before: Any) -> Any:
        """Chooses rows."""
        return tf.nest.map_structure(lambda a, b: _rows_of(new, a, b), kept, before)


class Generator:
    """The graphs that compute tokens, for stages on devices of their own.

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
                continues unchanged), and seeds `[prompts, 2]`, all int32.
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
        """Chooses tokens, one after the other.

        Args:
            groups: all groups.
            steps: the number of tokens.

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

    def _through(
        self, turns: Turns, theta: Any, number: int, ids: Any, places: Any, last: Any, kept: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        """Passes tokens of a group through all stages; returns logits and caches."""
        # Prefill overwrites earlier caches.
        args, after = self._task.DecodeArgs(ids, places), []
        replica = number % self.num_replicas
        for stage in range(len(self._stack.stage_names)):
            before = kept[stage] if kept else None
            device = stage * self.num_replicas + replica
            args = turns.enter(device, to_tuple(args))
            cache = KeyValueCache(self._length, places, before, last, overwrites=bool(kept))
            with cache_scope(cache):
                args = self._stack.FPropStage(theta, stage, *args, replica=replica)
            turns.leave(device, args)
            after.append(cache.kept)
        return args, after

    def _begin_groups(self, numbers: tuple[int, ...], prompts: Any, before: Any) -> Any:
        # Gradients stay, although nothing differentiates here. Removing their operations makes
        # prefill of two groups 1.4 times slower; the cause is unknown.
        with self._cluster():
            theta, turns = self._theta(), Turns.free(self._devices)
            return [
                self._begin_group(turns, theta, *group)
                for group in zip(numbers, prompts, before, strict=True)
            ]

    def _begin_group(
        self, turns: Turns, theta: Any, number: int, prompt: Any, before: Group | None
    ) -> Any:
        ids, lengths, seeds = prompt
        rows, most = ids.shape
        places = tf.tile(tf.range(most)[None], [rows, 1])
        last = tf.maximum(lengths - 1, 0)
        logits, kept = self._through(turns, theta, number, ids, places, last, None)
        return self._begun(logits, lengths, seeds, kept, before, self._caches)

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster(), no_gradients():
            theta = self._theta()
            gates = Turns.free(self._devices).gates
            # Copy the caller's caches once, instead of for each token.
            groups = [group._replace(kept=_copied(group.kept)) for group in groups]
            arrays = [
                [tf.TensorArray(dtype, steps) for dtype in self.chooser.result_types]
                for _ in groups
            ]

            def body(step: tf.Tensor, gates: Any, groups: Any, arrays: Any) -> Any:
                turns = Turns(gates)
                results = [
                    self._step(turns, theta, number, group) for number, group in enumerate(groups)
                ]
                written = [
                    [a.write(step, value) for a, value in zip(group_arrays, values, strict=True)]
                    for group_arrays, (_, values) in zip(arrays, results, strict=True)
                ]
                return step + 1, turns.gates, [group for group, _ in results], written

            _, _, groups, arrays = tf.while_loop(
                lambda step, *_: step < steps,
                body,
                (tf.constant(0), gates, groups, arrays),
                parallel_iterations=_STEPS_AT_ONCE,
            )
            return groups, [tuple(array.stack() for array in group) for group in arrays]

    def _step(self, turns: Turns, theta: Any, number: int, group: Group) -> Any:
        # A complete row continues until the next check; it never moves beyond its last position.
        places = tf.minimum(group.places, self._length - 1)
        last = tf.zeros_like(places)
        ids = group.tokens[:, None]
        logits, kept = self._through(turns, theta, number, ids, places[:, None], last, group.kept)
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
        caches: _Caches,
    ) -> tuple[Group, tuple[tf.Tensor, ...]]:
        """Chooses the first tokens of new rows; rows without a prompt stay as they were."""
        with tf.device(logits.device):
            choice = self.chooser.begin(logits, seeds, self.stop)
        lengths = tf.repeat(lengths, self.chooser.width)
        after = _after(choice, lengths, kept, caches)
        if before is not None:
            new = lengths > 0
            after = Group(
                _rows_of(new, after.tokens, before.tokens),
                _rows_of(new, after.places, before.places),
                _rows_of(new, after.state, before.state),
                caches.merged(new, after.kept, before.kept),
            )
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

                def put(slots: tf.Tensor, value: tf.Tensor) -> tf.Tensor:
                    value = tf.where(leaves, value, slots[group])
                    return tf.tensor_scatter_nd_update(slots, [[group]], [value])

                index = tf.where(leaves, last.turn * number + group, steps * number)
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


def generator_of(
    task: Any,
    stack: Any,
    cluster: Callable[[], Any],
    length: int,
    chooser: Chooser,
    stop: Collection[int] = (),
) -> Generator:
    """Returns the generator for a stack, by its lowering.

    Args:
        task: a lingvo task with `DecodeArgs`.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: the positions of a row.
        chooser: chooses tokens.
        stop: ids that end a continuation.

    Returns:
        A `SimdGenerator` for a stack with `lowering="simd"`, else a `Generator`.
    """
    kind = Generator if stack.simd is None else SimdGenerator
    return kind(task, stack, cluster, length, chooser, stop)


def _after(choice: Choice, places: tf.Tensor, kept: Any, caches: _Caches) -> Group:
    """Returns a group after a choice. The rows of a prompt have the same position."""
    if choice.parents is not None:
        kept = caches.followed(kept, choice.parents)
    return Group(choice.ids, places, choice.state, kept)


def _rows_of(chosen: tf.Tensor, new: tf.Tensor, old: tf.Tensor) -> tf.Tensor:
    """Returns the rows of `new` where `chosen` is true, else those of `old`."""
    with tf.device(new.device):
        return tf.where(tf.reshape(chosen, [-1] + [1] * (new.shape.rank - 1)), new, old)


def _copied(kept: Any) -> Any:
    return tf.nest.map_structure(
        lambda cache: _beside(cache, lambda: tf.raw_ops.DeepCopy(x=cache)), kept
    )


def _beside(tensor: tf.Tensor, compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Computes on the device of a tensor."""
    with tf.device(tensor.device):
        return compute()
