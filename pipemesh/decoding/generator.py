"""The graphs of decoding: prompts go in, tokens come out, group by group through the stages.

A group of rows is a microbatch. In a step of the loop each group gets a token: it passes all
stages, one after the other, and what is chosen behind the last is the input of the first in the
next step. Groups depend on nothing of each other but that each stage takes them in turn, so while
one is at a stage another is at the next, across steps of the loop too: `pipemesh.schedule.decode`
is the table.
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
from pipemesh.layers.pipeline.weight_dtypes import plain_theta

# How many steps of the loop may be under way at the same time.
_STEPS_AT_ONCE = 4


class Generator:
    """Computes tokens.

    Args:
        task: a task of lingvo with `DecodeArgs`.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: places a row.
        chooser: chooses tokens.
        stop: ids that end a continuation.

    Attributes:
        chooser: chooses tokens.
        stop: ids that end a continuation.
        multiple: what the prompts of a group are a multiple of: each replica has groups of its own.
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
        """Reads prompts, and chooses the token behind each.

        Args:
            numbers: of the groups.
            prompts: for each group ids `[prompts, length]`, lengths `[prompts]` (0 for one that
                goes on as it is), and seeds `[prompts, 2]`, all int32.
            before: the groups as they were; None for those that begin.

        Returns:
            For each group what it is now, and what its rows are told, prompts in front.
        """
        # Which replica a group is at is all that its graph depends on.
        replicas = tuple(number % self.num_replicas for number in numbers)
        return self._begin(replicas, list(prompts), list(before))

    def go_on(
        self, groups: Sequence[Group], steps: int | tf.Tensor
    ) -> tuple[list[Group], list[Any]]:
        """Chooses tokens, one after the other.

        Args:
            groups: all of them.
            steps: how many tokens.

        Returns:
            The groups, and for each what its rows are told, steps and then prompts in front.
        """
        return self._go_on(list(groups), tf.convert_to_tensor(steps))

    def _theta(self) -> Any:
        stack = self._stack
        return plain_theta(stack, stack.theta, stack.stage_names)

    def _through(
        self, turns: Turns, theta: Any, number: int, ids: Any, places: Any, last: Any, kept: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        """Some tokens of a group through all stages: logits, and what is kept.

        What was kept before is overwritten.
        """
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
        # With gradients, though nobody asks for them: without the operations that carry them
        # prompts of two groups take 1.4 times as long.
        with self._cluster():
            theta, turns = self._theta(), Turns.free(self._devices)
            return [
                self._begin_group(turns, theta, *each)
                for each in zip(numbers, prompts, before, strict=True)
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
        return after, choice.told

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster(), no_gradients():
            theta = self._theta()
            gates = Turns.free(self._devices).gates
            # The caller's are copied once, instead of for each token.
            groups = [group._replace(kept=_copied(group.kept)) for group in groups]
            arrays = [[tf.TensorArray(dtype, steps) for dtype in self.chooser.told] for _ in groups]

            def body(step: tf.Tensor, gates: Any, groups: Any, arrays: Any) -> Any:
                turns = Turns(gates)
                found = [
                    self._step(turns, theta, number, group) for number, group in enumerate(groups)
                ]
                written = [
                    [a.write(step, value) for a, value in zip(own, told, strict=True)]
                    for own, (_, told) in zip(arrays, found, strict=True)
                ]
                return step + 1, turns.gates, [group for group, _ in found], written

            _, _, groups, arrays = tf.while_loop(
                lambda step, *_: step < steps,
                body,
                (tf.constant(0), gates, groups, arrays),
                parallel_iterations=_STEPS_AT_ONCE,
            )
            return groups, [tuple(each.stack() for each in own) for own in arrays]

    def _step(self, turns: Turns, theta: Any, number: int, group: Group) -> Any:
        # A row that is done goes on until somebody looks; beyond its end it stays at the end.
        places = tf.minimum(group.places, self._length - 1)
        last = tf.zeros_like(places)
        ids = group.tokens[:, None]
        logits, kept = self._through(turns, theta, number, ids, places[:, None], last, group.kept)
        with tf.device(logits.device):
            choice = self.chooser.choose(logits, group.state, self.stop)
        return _after(choice, group.places + 1, kept), choice.told


def _after(choice: Choice, places: tf.Tensor, kept: Any) -> Group:
    """A group behind a choice. The rows of a prompt are at the same place."""
    parents = choice.parents
    if parents is not None:
        kept = tf.nest.map_structure(
            lambda each: _beside(each, lambda: tf.gather(each, parents)), kept
        )
    return Group(choice.ids, places, choice.state, kept)


def _copied(kept: Any) -> Any:
    return tf.nest.map_structure(
        lambda each: _beside(each, lambda: tf.raw_ops.DeepCopy(x=each)), kept
    )


def _beside(there: tf.Tensor, compute: Callable[[], tf.Tensor]) -> tf.Tensor:
    """What is computed where something lies."""
    with tf.device(there.device):
        return compute()


def generator_of(
    task: Any,
    stack: Any,
    cluster: Callable[[], Any],
    length: int,
    chooser: Chooser,
    stop: Collection[int] = (),
) -> Generator | SimdGenerator:
    """The generator for a stack, by its lowering.

    Args:
        task: a task of lingvo with `DecodeArgs`.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: places a row.
        chooser: chooses tokens.
        stop: ids that end a continuation.
    """
    kind = Generator if stack.simd is None else SimdGenerator
    return kind(task, stack, cluster, length, chooser, stop)
