"""Attention to sequences that are split over a mesh axis and are on no device as a whole.

Queries stay; keys and values go round in a ring, so that all queries meet all keys (Liu et al.,
"Ring Attention with Blockwise Transformers for Near-Infinite Context", 2023). Processors compute
with some while the next ones are on their way. In the backward pass they go round again, and their
gradients with them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.layers.named.block_attention import (
    EVERYTHING,
    BlockAttention,
    Blocks,
    Buckets,
    Sight,
    no_second,
    together,
)
from pipemesh.lowering import Lowering
from pipemesh.lowering.lowering import Slices


@dataclasses.dataclass(frozen=True)
class Ring:
    """The course of attention to a sequence that is split over an axis.

    In step `i` a processor meets the keys of the one `i` places before it. In causal attention the
    last processor would see all tokens and the first one only its own. So, where no distances
    count, each takes two halves of parts, one from the front and one from the back (the zigzag of
    Zhu, "ring-flash-attention", 2024): then all have the same work.

    Attributes:
        members: processors of the ring.
        queries: queries of one.
        keys: keys of one.
        sight: the keys that a query sees.
        is_biased: whether scores have a bias by distance.
        block_size: as for `block_attention`.
    """

    members: int
    queries: int
    keys: int
    sight: Sight
    is_biased: bool
    block_size: int

    @property
    def is_zigzag(self) -> bool:
        """Returns whether processors have a part from the front and one from the back."""
        by_distance = self.is_biased or self.sight.window is not None
        return self.sight.causal and not by_distance and self.queries % 2 == 0

    @property
    def counts_distances(self) -> bool:
        """Returns whether it matters how far a query is from a key."""
        return self.is_biased or self.sight != EVERYTHING

    @property
    def steps(self) -> int:
        """Returns how many processors' keys a query meets."""
        if not (self.sight.causal and self.sight.window):
            return self.members
        return min(self.members, 1 - -(self.sight.window - 1) // self.keys)

    @property
    def pairs(self) -> int:
        """Returns how many pairs of a query and a key one processor computes."""

        def computed(sight: Sight, queries: int, keys: int) -> int:
            cuts = [Blocks.of(size, self.block_size) for size in (queries, keys)]
            return len(sight.pairs(cuts[0], cuts[1])) * cuts[0].size * cuts[1].size

        later = computed(EVERYTHING, self.queries, self.keys)
        if self.is_zigzag:
            later = 2 * computed(EVERYTHING, self.queries // 2, self.keys // 2)
        return computed(self.sight, self.queries, self.keys) + (self.steps - 1) * later

    def send(self, lowering: Lowering, axis: str, x: Slices, step: int) -> Slices:
        """Sends keys on for a step, which then are at home in step `steps`."""
        offset = 1 if step < self.steps else (1 - self.steps) % self.members
        return lowering.raw_circle(x, axis, offset) if offset else x

    def count(self, lowering: Lowering, axis: str, keys: Sequence[Any], ids: Sequence[Any]) -> None:
        """Counts what `ring_attention` sends: keys and values, and their segments."""
        grads = [
            tuple(dataclasses.replace(part, dtype=tf.float32) for part in slices) for slices in keys
        ]

        def send(sent: Sequence[Any], first: int, last: int) -> None:
            for step in range(first, last + 1):
                for slices in sent:
                    self.send(lowering, axis, slices, step)

        send([*keys, *ids], 1, self.steps - 1)
        lowering.in_backward(send, [*keys, *ids], 1, self.steps - 1)
        lowering.in_backward(send, grads, 1, self.steps)


def zigzag(lowering: Lowering, axis: str, x: Slices, back: bool = False) -> Slices:
    """Moves parts `[batch, length, ...]` to the processors of a zigzag, or `back`.

    The halves of all parts are numbered. Processor `i` of `n` gets the halves `i` and `2n - 1 - i`.
    """
    n = lowering.mesh.size(axis)
    target = [half if half < n else 2 * n - 1 - half for half in range(2 * n)]
    at = lowering.coordinate(axis)

    def half(number: int) -> Callable[..., tf.Tensor]:
        """Returns the function that takes the half of this parity, which a zigzag has in turn."""

        def take(part: tf.Tensor, at: Any) -> tf.Tensor:
            first, second = tf.split(part, 2, axis=1)
            if back:
                is_first = tf.equal(at % 2, number)
                return tf.where(is_first, first, second)
            return second if number else first

        return take

    def join(even: tf.Tensor, odd: tf.Tensor, at: Any) -> tf.Tensor:
        if back:
            return tf.concat([even, odd], 1)
        return tf.where(tf.equal(at % 2, 0), tf.concat([even, odd], 1), tf.concat([odd, even], 1))

    sent = []
    for number in (0, 1):
        pairs = [(part, target[2 * part + number]) for part in range(n)]
        if back:
            pairs = [(b, a) for a, b in pairs]
        sent.append(lowering.permute(lowering.map(half(number), x, at), axis, pairs))
    return lowering.map(join, *sent, at)


def count_zigzag(lowering: Lowering, axis: str, slices: Sequence[Any]) -> None:
    """Counts what `zigzag` sends of each of some tensors."""
    for (x,) in slices:
        sizes = x.shape.as_list()
        half = dataclasses.replace(x, shape=tf.TensorShape([sizes[0], sizes[1] // 2, *sizes[2:]]))
        for _ in range(2):
            lowering.permute((half,), axis, ())


@dataclasses.dataclass(frozen=True)
class _Step:
    """A step of a ring on one processor, and which of its tokens meet.

    In a zigzag all keys of the other processor's front are seen by the own back. Besides, the own
    front sees that front if it is behind it; else the own back sees the other back.
    """

    ring: Ring
    number: int
    at: tf.Tensor  # the processor's coordinate

    @property
    def in_halves(self) -> bool:
        """Returns whether halves meet, one beside the other as rows of a batch."""
        return self.ring.is_zigzag and self.number > 0

    @property
    def is_front(self) -> tf.Tensor:
        """Returns whether the fronts meet, else the backs."""
        return self.at >= self.number

    def taken(self, x: Any, half: int) -> Any:
        """Returns the tokens that meet: `half` in the first pair, 1 for queries and 0 for keys."""
        if x is None or not self.in_halves:
            return x
        front, back = halves = tf.split(x, 2, axis=1)
        return tf.concat([halves[half], tf.where(self.is_front, front, back)], 0)

    def spread(self, grad: tf.Tensor, half: int) -> tf.Tensor:
        """Returns the gradient of the input of `taken`."""
        if not self.in_halves:
            return grad
        first, second = tf.split(grad, 2, axis=0)
        zero = tf.zeros_like(second)
        halves = [tf.where(self.is_front, second, zero), tf.where(self.is_front, zero, second)]
        halves[half] += first
        return tf.concat(halves, 1)

    def attention(
        self, q: tf.Tensor, k: tf.Tensor, segments: Any, key_segments: Any, cap: Any, buckets: Any
    ) -> BlockAttention:
        """Returns the attention of what `taken` returned."""
        ring, sight, offset = self.ring, self.ring.sight, None
        if self.number and (ring.is_zigzag or not ring.counts_distances):
            sight = EVERYTHING
        elif self.number:
            places = tf.where(self.is_front, self.number, self.number - ring.members)
            offset = places * ring.keys
        return BlockAttention(
            q, k, segments, key_segments, ring.block_size, sight, cap, buckets, offset
        )

    def merged(
        self, before: Sequence[tf.Tensor], found: Sequence[tf.Tensor]
    ) -> Sequence[tf.Tensor]:
        """Adds the means of a step, and logarithms of sums, to those of the steps before."""
        if not self.in_halves:
            return _merged(before, found)
        front, back = zip(*(tf.split(x, 2, axis=1) for x in before), strict=True)
        first, second = zip(*(tf.split(x, 2, axis=0) for x in found), strict=True)
        back = _merged(back, first)
        pairs = list(zip(front, back, strict=True))
        news = _merged([tf.where(self.is_front, a, b) for a, b in pairs], second)
        return [
            tf.concat([tf.where(self.is_front, new, a), tf.where(self.is_front, b, new)], 1)
            for (a, b), new in zip(pairs, news, strict=True)
        ]


def _merged(one: Sequence[tf.Tensor], other: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns the means, and logarithms of sums of exponentials, over the keys of both."""
    (output, logs), (more, more_logs) = one, other
    top = tf.maximum(logs, more_logs)
    weight, more_weight = tf.exp(logs - top), tf.exp(more_logs - top)
    total = weight + more_weight
    return (output * weight + more * more_weight) / total, top + tf.math.log(total)


def ring_attention(
    lowering: Lowering,
    axis: str,
    ring: Ring,
    inputs: Sequence[Slices],
    segments: Slices | None = None,
    key_segments: Slices | None = None,
    cap: float | None = None,
    buckets: Buckets | None = None,
) -> Slices:
    """Averages the values that each query sees, as `block_attention`.

    Args:
        lowering: the lowering.
        axis: the mesh axis that splits the sequences.
        ring: the course; in a zigzag, all parts are those of `zigzag`.
        inputs: queries, keys, values, and the table of biases if there is one.
        segments: those of the queries, if they have any.
        key_segments: those of the keys; by default those of the queries.
        cap: limit of scores.
        buckets: those of the table.
    """
    attention = _RingAttention(lowering, axis, ring, segments, key_segments, cap, buckets)
    return lowering.with_gradient(
        attention.forward,
        lambda grad: lowering.in_backward(attention.backward, grad),
        *inputs,
    )


Named = dict[str, Slices]


class _RingAttention:
    """One attention in a ring; it keeps its inputs and its result for the backward pass."""

    def __init__(
        self,
        lowering: Lowering,
        axis: str,
        ring: Ring,
        segments: Slices | None,
        key_segments: Slices | None,
        cap: float | None,
        buckets: Buckets | None,
    ) -> None:
        self._lowering, self._axis, self._ring = lowering, axis, ring
        self._cap, self._buckets = cap, buckets
        self._at = lowering.coordinate(axis)
        self._own: Named = {} if segments is None else {"segments": segments}
        # Keys have the segments of the queries, unless they are another sequence.
        self._is_cross = key_segments is not None
        ids = segments if key_segments is None else key_segments
        self._held: Named = {} if ids is None else {"key_segments": ids}
        self._result: Named = {}

    def forward(self, q: Slices, k: Slices, v: Slices, *table: Slices) -> Slices:
        """Returns the means of values."""
        self._own["q"] = q
        self._own |= {"table": table[0]} if table else {}
        self._held |= {"k": k, "v": v}

        def meet(step: _Step, **x: tf.Tensor) -> Sequence[tf.Tensor]:
            attend, operands = self._operands(step, x)
            output, logs = attend.forward(*operands, dtype=tf.float32)
            found = output, attend.by_token(logs)
            return step.merged((x["output"], x["logs"]), found) if step.number else found

        held, state = self._held, Named()
        for number in range(self._ring.steps):
            held = self._sent(held, number)
            inputs = self._begun(number, self._own | held | state)
            held = {name: inputs[name] for name in held}
            found = self._each(meet, number, **inputs)
            state = dict(zip(("output", "logs"), found, strict=True))

        def low(
            step: _Step, output: tf.Tensor, logs: tf.Tensor, q: tf.Tensor
        ) -> Sequence[tf.Tensor]:
            # Tied, as in `BlockAttention.forward`.
            return tf.identity_n([tf.cast(output, q.dtype), logs])

        output, logs = self._each(low, 0, **state, q=q)
        self._result = {"output": output, "logs": logs}
        return output

    def backward(self, grad: Slices) -> list[Slices]:
        """Returns the gradients of queries, keys, values, and of the table if there is one."""

        def meet(step: _Step, **x: tf.Tensor) -> Sequence[tf.Tensor]:
            attend, operands = self._operands(step, x)
            grad, output, logs = (step.taken(x[name], 1) for name in ("grad", "output", "logs"))
            found = attend.backward(grad, output, attend.by_block(logs), *operands)
            found = [tf.cast(part, tf.float32) for part in found]
            found[:3] = map(step.spread, found[:3], (1, 0, 0))
            if not step.number:
                return found
            return [x[name] + part for name, part in zip(names, found, strict=True)]

        def last(step: _Step, grad: tf.Tensor, **x: tf.Tensor) -> Sequence[tf.Tensor]:
            inputs = [x[name.removeprefix("d_")] for name in names]
            found = [tf.cast(x[n], i.dtype) for n, i in zip(names, inputs, strict=True)]
            return attach_gradient(found, [grad, *inputs], no_second, across_devices=False)

        names = ["d_q", "d_k", "d_v"] + (["d_table"] if "table" in self._own else [])
        own, held, state = {**self._own, **self._result, "grad": grad}, self._held, Named()
        # The gradients of keys travel with them.
        gone = Named()
        with unrecorded():
            for number in range(self._ring.steps):
                held, gone = (self._sent(x, number) for x in (held, gone))
                # The step does not wait for gradients that are on their way.
                inputs = self._begun(number, own | held | state)
                held = {name: inputs[name] for name in held}
                found = self._each(meet, number, **inputs, **gone)
                state = dict(zip(names, found, strict=True))
                gone = {name: state.pop(name) for name in ("d_k", "d_v")}
            grads = state | self._sent(gone, self._ring.steps)
        return self._each(last, 0, grad=grad, **self._own, **self._held, **grads)

    def _operands(
        self, step: _Step, x: dict[str, tf.Tensor]
    ) -> tuple[BlockAttention, list[tf.Tensor]]:
        """Returns the attention of a step on one processor, and its inputs."""
        q, segments = (step.taken(x.get(name), 1) for name in ("q", "segments"))
        k, v, key_segments = (step.taken(x.get(name), 0) for name in ("k", "v", "key_segments"))
        if not (step.number or self._is_cross):
            key_segments = None
        attend = step.attention(q, k, segments, key_segments, self._cap, self._buckets)
        return attend, [q, k, v, *([x["table"]] if "table" in x else [])]

    def _each(
        self, function: Callable[..., Sequence[tf.Tensor]], number: int, **x: Slices
    ) -> list[Slices]:
        """Applies a function of a step, and of slices by name, on each processor."""

        def call(at: tf.Tensor, *tensors: tf.Tensor) -> Any:
            step = _Step(self._ring, number, at)
            return tuple(function(step, **dict(zip(x, tensors, strict=True))))

        return list(zip(*self._lowering.raw_map(call, self._at, *x.values()), strict=True))

    def _begun(self, number: int, x: Named) -> Named:
        """Returns the inputs of a step, when the step before has ended on the processor.

        Else all steps would begin at once, and a processor would hold the keys of the whole
        sequence and the scores of each step. Keys are sent on from here: they reach the next
        processor while this step is computed.
        """
        if number == 0:
            return x
        begun = self._each(lambda step, **x: together(*x.values()), number, **x)
        return dict(zip(x, begun, strict=True))

    def _sent(self, x: Named, number: int) -> Named:
        """Sends slices on, to be where a step needs them."""
        if number == 0:
            return x
        return {
            name: self._ring.send(self._lowering, self._axis, slices, number)
            for name, slices in x.items()
        }
