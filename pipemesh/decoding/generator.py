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
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import no_gradients
from pipemesh.decoding.choice import Choice, Chooser
from pipemesh.decoding.group import Group, rows_of
from pipemesh.decoding.simd_generator import SimdGenerator
from pipemesh.decoding.turns import Turns
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.named import KeyValueCache, cache_scope
from pipemesh.layers.pipeline.weights import plain_theta

# Number of loop steps that may run at the same time.
_STEPS_AT_ONCE = 4


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
        with cluster():
            homes = stack.StageHomes()
            self.num_replicas = homes[0].num_replicas
            # The first device of each replica of each stage, stage by stage.
            self._devices = [
                home.replica(number)[0] for home in homes for number in range(self.num_replicas)
            ]
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
        with tf.device(logits.device):
            choice = self.chooser.begin(logits, seeds, self.stop)
        lengths = tf.repeat(lengths, self.chooser.width)
        after = _after(choice, lengths, kept)
        if before is not None:
            new = functools.partial(rows_of, lengths > 0)
            after = tf.nest.map_structure(new, after, before)
        return after, choice.results

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
        return _after(choice, group.places + 1, kept), choice.results


def _after(choice: Choice, places: tf.Tensor, kept: Any) -> Group:
    """Returns a group after a choice. The rows of a prompt have the same position."""
    parents = choice.parents
    if parents is not None:
        kept = tf.nest.map_structure(
            lambda cache: _beside(cache, lambda: tf.gather(cache, parents)), kept
        )
    return Group(choice.ids, places, choice.state, kept)


def _copied(kept: Any) -> Any:
    return tf.nest.map_structure(
        lambda cache: _beside(cache, lambda: tf.raw_ops.DeepCopy(x=cache)), kept
    )


def _beside(tensor: tf.Tensor, compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """Computes on the device of a tensor."""
    with tf.device(tensor.device):
        return compute()


def generator_of(
    task: Any,
    stack: Any,
    cluster: Callable[[], Any],
    length: int,
    chooser: Chooser,
    stop: Collection[int] = (),
) -> Generator | SimdGenerator:
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
