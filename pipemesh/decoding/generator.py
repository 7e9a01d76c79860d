"""The graphs of decoding: prompts go in, tokens come out, group by group through the stages.

A group of rows is a microbatch. In a step of the loop each group gets a token: it passes all
stages, one after the other, and what is drawn behind the last is the input of the first in the
next step. Groups depend on nothing of each other, so while one is at a stage another is at the
next: TensorFlow runs what is ready, across steps of the loop too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.decoding.sampling import Sampler
from pipemesh.layers.feature_extraction import to_tuple
from pipemesh.layers.named import KeyValueCache, cache_scope
from pipemesh.layers.pipeline.weight_dtypes import plain_theta

# How many steps of the loop may be under way at the same time.
_STEPS_AT_ONCE = 4


class Group(NamedTuple):
    """The rows of a group between two calls, all on their devices.

    Attributes:
        tokens: `[rows]` int32, the last ones, which nothing has been computed of.
        places: `[rows]` int32, where they stand.
        seeds: `[rows, 2]` int32; the second one grows by one with every token.
        kept: of each stage the `kept` of its `KeyValueCache`.
    """

    tokens: tf.Tensor
    places: tf.Tensor
    seeds: tf.Tensor
    kept: Any


class Generator:
    """Computes tokens.

    Args:
        task: a task of lingvo with `DecodeArgs`.
        stack: its stack of stages.
        cluster: makes a context to call the task in.
        length: places a row.
        sampler: chooses tokens.
    """

    def __init__(
        self, task: Any, stack: Any, cluster: Callable[[], Any], length: int, sampler: Sampler
    ) -> None:
        self._task, self._stack, self._cluster = task, stack, cluster
        self._length, self._sampler = length, sampler
        with cluster():
            self.num_replicas = stack.StageHomes()[0].num_replicas
        self._begin = tf.function(self._begin_groups, autograph=False)
        self._go_on = tf.function(self._go_on_groups, autograph=False)

    def begin(
        self, numbers: Sequence[int], prompts: Sequence[Any], before: Sequence[Group | None]
    ) -> list[tuple[Group, tf.Tensor, tf.Tensor]]:
        """Reads prompts, and chooses the token behind each.

        Args:
            numbers: of the groups.
            prompts: for each group ids `[rows, prompt]`, lengths `[rows]` (0 for a row that
                goes on as it is), and seeds `[rows, 2]`, all int32.
            before: the groups as they were; None for those that begin.

        Returns:
            For each group what it is now, and its tokens and their log probabilities, `[rows]`.
        """
        return self._begin(tuple(numbers), list(prompts), list(before))

    def go_on(self, groups: Sequence[Group], steps: int) -> tuple[list[Group], Any, Any]:
        """Chooses tokens, one after the other.

        Args:
            groups: all of them.
            steps: how many tokens.

        Returns:
            The groups, and for each its tokens and their log probabilities, `[steps, rows]`.
        """
        return self._go_on(list(groups), tf.constant(steps))

    def _theta(self) -> Any:
        stack = self._stack
        return plain_theta(stack, stack.theta, stack.stage_names)

    def _through(
        self, theta: Any, number: int, ids: Any, places: Any, last: Any, kept: Any
    ) -> tuple[tf.Tensor, list[Any]]:
        """Some tokens of a group through all stages: logits, and what is kept."""
        args, after = self._task.DecodeArgs(ids, places), []
        for stage in range(len(self._stack.stage_names)):
            before = kept[stage] if kept else None
            with cache_scope(KeyValueCache(self._length, places, before, last)) as cache:
                args = self._stack.FPropStage(
                    theta, stage, *to_tuple(args), replica=number % self.num_replicas
                )
            after.append(cache.kept)
        return args, after

    def _begin_groups(self, numbers: tuple[int, ...], prompts: Any, before: Any) -> Any:
        with self._cluster():
            theta = self._theta()
            return [
                self._begin_group(theta, *each)
                for each in zip(numbers, prompts, before, strict=True)
            ]

    def _begin_group(self, theta: Any, number: int, prompt: Any, before: Group | None) -> Any:
        ids, lengths, seeds = prompt
        rows, most = ids.shape
        places = tf.tile(tf.range(most)[None], [rows, 1])
        last = tf.maximum(lengths - 1, 0)
        logits, kept = self._through(theta, number, ids, places, last, None)
        tokens, log_probs = self._sampler.choose(logits, seeds)
        after = Group(tokens, lengths, _next(seeds), kept)
        if before is not None:
            after = tf.nest.map_structure(
                lambda new, old: tf.where(_rows(lengths > 0, new), new, old), after, before
            )
        return after, tokens, log_probs

    def _go_on_groups(self, groups: list[Group], steps: tf.Tensor) -> Any:
        with self._cluster():
            theta = self._theta()
            arrays = [
                tuple(tf.TensorArray(dtype, steps) for dtype in (tf.int32, tf.float32))
                for _ in groups
            ]

            def body(step: tf.Tensor, groups: Any, arrays: Any) -> Any:
                found = [self._step(theta, number, group) for number, group in enumerate(groups)]
                written = [
                    tuple(a.write(step, value) for a, value in zip(own, each[1:], strict=True))
                    for own, each in zip(arrays, found, strict=True)
                ]
                return step + 1, [each[0] for each in found], written

            _, groups, arrays = tf.while_loop(
                lambda step, *_: step < steps,
                body,
                (tf.constant(0), groups, arrays),
                parallel_iterations=_STEPS_AT_ONCE,
            )
            return groups, [a.stack() for a, _ in arrays], [b.stack() for _, b in arrays]

    def _step(self, theta: Any, number: int, group: Group) -> Any:
        # A row that is done goes on until somebody looks; beyond its end it stays at the end.
        places = tf.minimum(group.places, self._length - 1)
        last = tf.zeros_like(places)
        ids = group.tokens[:, None]
        logits, kept = self._through(theta, number, ids, places[:, None], last, group.kept)
        tokens, log_probs = self._sampler.choose(logits, group.seeds)
        after = Group(tokens, group.places + 1, _next(group.seeds), kept)
        return after, tokens, log_probs


def _next(seeds: tf.Tensor) -> tf.Tensor:
    """The seeds of the tokens behind."""
    return seeds + tf.constant([0, 1])


def _rows(chosen: tf.Tensor, like: tf.Tensor) -> tf.Tensor:
    """`[rows]` with as many dims as a tensor of rows, which may be some of them."""
    return tf.reshape(chosen, [-1] + [1] * (like.shape.rank - 1))
