"""Attention on one device, block by block, without the matrix of all scores.

Blocks of queries meet the blocks of keys that they may see, one pair after the other. An online
softmax corrects its results when a greater score comes (Milakov and Gimelshein, 2018). It keeps for
each query its maximum, its sum, and the sum of values. The backward pass recomputes scores (Dao et
al., "FlashAttention", 2022). Memory holds queries, keys and values, and the scores of one pair.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, unrecorded
from pipemesh.backend.operations import UNTOUCHED, mark
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import GradientError

# Low enough for an exponential of 0, and finite in differences; lower than any maximum.
LOW = -1e30
LOWEST_TOP = LOW / 2


@dataclasses.dataclass(frozen=True)
class Buckets:
    """Buckets of distances that share a bias (Raffel et al., "T5", 2020).

    Each bucket of the first half has one distance. The others grow logarithmically up to
    `max_distance`; greater distances share the last one. If queries see both sides, the second half
    of all buckets is for later keys.
    """

    number: int  # of a side 2 or more
    max_distance: int  # more than half of the number of a side
    both_sides: bool = False

    @property
    def of_side(self) -> int:
        """Returns the number of buckets of one side."""
        return self.number // 2 if self.both_sides else self.number

    def of(self, distance: tf.Tensor) -> tf.Tensor:
        """Returns the bucket of each distance, an int32; keys that no query sees have the first."""
        number, exact = self.of_side, self.of_side // 2
        away = tf.abs(distance) if self.both_sides else tf.maximum(distance, 0)
        ratio = tf.cast(tf.maximum(away, exact), tf.float32) / exact
        steps = tf.math.log(ratio) / math.log(self.max_distance / exact) * (number - exact)
        far = tf.minimum(exact + tf.cast(steps, tf.int32), number - 1)
        found = tf.where(away < exact, away, far)
        return tf.where(distance < 0, number + found, found) if self.both_sides else found


@dataclasses.dataclass(frozen=True)
class Sight:
    """The keys that a query sees, by their distance: how many positions they are before it."""

    causal: bool = True
    window: int | None = None  # how many it sees at most, with itself, on each side

    def sees(self, distance: tf.Tensor) -> tf.Tensor | None:
        """Returns whether a query sees a key at each distance, or None if it sees all."""
        seen = distance >= 0 if self.causal else None
        if self.window is not None:
            near = tf.abs(distance) < self.window
            seen = near if seen is None else seen & near
        return seen

    def pairs(self, queries: Blocks, keys: Blocks, offset: int = 0) -> list[tuple[int, int]]:
        """Returns each block of queries with the blocks of keys that it may see, in order.

        The first query is `offset` positions after the first key.
        """
        met: list[tuple[int, int]] = []
        for i, j in itertools.product(range(queries.number), range(keys.number)):
            least, most = _distances(queries, i, keys, j)
            if self._meet(least + offset, most + offset):
                met.append((i, j))
        return met

    def pairs_at(self, offset: tf.Tensor, queries: Blocks, keys: Blocks) -> tf.Tensor:
        """Returns the same, `[pairs, 2]`, for queries that are `offset` positions behind."""
        places = itertools.product(range(queries.number), range(keys.number))
        shown = []
        for i, j in places:
            least, most = _distances(queries, i, keys, j)
            shown.append(self._meet_at(least + offset, most + offset))
        found = tf.where(tf.reshape(tf.stack(shown), [queries.number, keys.number]))
        return tf.cast(found, tf.int32)

    def _meet(self, least: int, most: int) -> bool:
        """Returns whether a query may see a key that is from `least` to `most` before it."""
        nearest = max(least, -most, 0)
        return (self.window is None or nearest < self.window) and not (self.causal and most < 0)

    def _meet_at(self, least: tf.Tensor, most: tf.Tensor) -> tf.Tensor:
        """Returns the same for tensors."""
        nearest = tf.maximum(tf.maximum(least, -most), 0)
        meet = tf.constant(True) if self.window is None else nearest < self.window
        return meet & (most >= 0) if self.causal else meet


def _distances(queries: Blocks, i: int, keys: Blocks, j: int) -> tuple[int, int]:
    """Returns how many positions keys of a block are before queries of another, least and most."""
    least = i * queries.size - (j + 1) * keys.size + 1
    return least, least + queries.size + keys.size - 2


def together(*tensors: tf.Tensor) -> list[tf.Tensor]:
    """Returns tensors of one device when all of them have been computed.

    TensorFlow starts each operation that has its inputs. A backward pass would begin with the
    scores of all layers, and hold them until their gradients come.
    """
    # A control dependency would be lost when a pipeline cuts the graph.
    results = tf.identity_n(tensors)
    if not tf.executing_eagerly():
        mark(results[0].op, UNTOUCHED)
    return results


def capped(scores: tf.Tensor, cap: float | None) -> tf.Tensor:
    """Limits scores smoothly to values between `-cap` and `cap`."""
    return scores if cap is None else cap * tf.tanh(scores / cap)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """The cut of a length into blocks."""

    length: int
    number: int
    size: int  # the last block may extend beyond the sequence

    @classmethod
    def of(cls, length: int, most: int) -> Blocks:
        """Makes equal blocks of at most `most` positions."""
        number = max(1, -(-length // most))
        return cls(length, number, -(-length // number))

    @property
    def is_longer(self) -> bool:
        """Returns whether the last block extends beyond the sequence."""
        return self.number * self.size > self.length

    def padded(self, x: tf.Tensor, value: int = 0) -> Sequence[tf.Tensor] | tf.Tensor:
        """Cuts `[batch, length, ...]` to `[number, batch, size, ...]` or a list of one block."""
        if self.number == 1:
            return [x]
        after = self.number * self.size - self.length
        paddings = [[0, after if i == 1 else 0] for i in range(x.shape.rank)]
        x = tf.pad(x, paddings, constant_values=value) if self.is_longer else x
        batch, _, *rest = static_sizes(x)
        x = tf.reshape(x, [batch, self.number, self.size, *rest])
        return tf.transpose(x, [1, 0, *range(2, x.shape.rank)])

    def joined(self, blocks: Sequence[tf.Tensor] | tf.Tensor) -> tf.Tensor:
        """Joins the result of `padded` again."""
        if self.number == 1:
            return blocks[0]
        x = tf.convert_to_tensor(blocks)
        x = tf.transpose(x, [1, 0, *range(2, x.shape.rank)])
        batch, _, _, *rest = static_sizes(x)
        return tf.reshape(x, [batch, self.number * self.size, *rest])[:, : self.length]


CAUSAL = Sight()
EVERYTHING = Sight(causal=False)


def block_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    segments: tf.Tensor | None = None,
    table: tf.Tensor | None = None,
    buckets: Buckets | None = None,
    block_size: int = 512,
    sight: Sight = CAUSAL,
    cap: float | None = None,
    key_segments: tf.Tensor | None = None,
    offset: tf.Tensor | int | None = None,
) -> tf.Tensor:
    """Averages the values that each query sees: those of its segment within its sight.

    Queries are scaled and `[batch, length, heads, dim]`, keys and values `[batch, key length,
    kv_heads, dim]`: `heads / kv_heads` neighbouring heads share one. Segments are `[batch, length]`
    int32; only padding is negative. Keys have those of the queries, or their own. Queries without
    segments have 0. One that sees nothing has zeros. Scores are limited by `cap`, then the table
    `[buckets, heads]` is added. With `offset`, an int or an int32 scalar, the first query is as
    many positions after the first key. Only first derivatives are available.
    """
    attend = BlockAttention(q, k, segments, key_segments, block_size, sight, cap, buckets, offset)
    inputs = [q, k, v] if table is None else [q, k, v, table]
    with unrecorded():
        output, logs = attend.forward(q, k, v, table)

    def backward(grads: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
        with unrecorded():
            found = attend.backward(grads[0], output, logs, *inputs)
        return attach_gradient(found, [grads[0], *inputs], no_second, across_devices=False)

    return attach_gradient([output], inputs, backward, across_devices=False)[0]


def no_second(grads: Any) -> Any:
    """Raises the error of a second derivative of attention."""
    raise GradientError(
        "a gradient of a gradient of attention was asked for, whose blocks have first derivatives "
        "alone; differentiate once, or write the attention with ops.einsum and ops.softmax"
    )


class BlockAttention:
    """The sizes of one attention, and its computation; see `block_attention`.

    Blocks of queries are `[blocks, batch, kv_heads, heads per key * size, dim]`, blocks of keys
    `[blocks, batch, kv_heads, size, dim]`. One block is a list of one tensor.
    """

    def __init__(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        segments: tf.Tensor | None,
        key_segments: tf.Tensor | None,
        block_size: int,
        sight: Sight,
        cap: float | None,
        buckets: Buckets | None,
        offset: tf.Tensor | int | None = None,
    ) -> None:
        self.queries, self.keys = (Blocks.of(static_sizes(x)[1], block_size) for x in (q, k))
        # Queries are not before what the last block has behind the sequence.
        sees_beyond = offset is not None or not sight.causal
        if segments is None and key_segments is None and self.keys.is_longer and sees_beyond:
            # Nobody sees that.
            key_segments = tf.zeros([1, self.keys.length], tf.int32)
        if segments is None and key_segments is not None:
            segments = tf.zeros([1, self.queries.length], tf.int32)
        self.sight, self.cap, self.buckets, self.offset = sight, cap, buckets, offset
        self.is_single = self.queries.number == self.keys.number == 1
        self.batch, _, self.heads, self.dim = static_sizes(q)
        self.kv_heads = static_sizes(k)[2]
        self.shared = self.heads // self.kv_heads
        self.segments = self.key_segments = None
        if segments is not None:
            self.segments = self.key_segments = self._blocks(self.queries, segments, -2)
        # Whether a query may see no key: none has its segment, or all are too far away.
        self.sees_nothing = key_segments is not None or offset is not None
        if key_segments is not None:
            self.key_segments = self._blocks(self.keys, key_segments, -2)

    def forward(
        self,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        table: tf.Tensor | None = None,
        dtype: tf.DType | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns the output, and the logarithm of the sum of exponentials of each query.

        The output is of a dtype, by default that of the queries.
        """
        queries = self._cut(self.queries, q)
        keys, values = (self._cut(self.keys, x) for x in (k, v))

        def meet(i: Any, j: Any, before: tf.Tensor | None = None) -> Any:
            scores, _ = self._scores(i, j, queries[i], keys[j], table)
            top = tf.reduce_max(scores, -1, keepdims=True)
            if before is not None or self.sees_nothing:
                top = tf.maximum(LOWEST_TOP if before is None else before, top)
            raised = tf.exp(scores - top)
            weighed = tf.matmul(tf.cast(raised, v.dtype), values[j])
            added = tf.reduce_sum(raised, -1, keepdims=True)
            return top, added, tf.cast(weighed, tf.float32)

        def body(i: Any, j: Any, tops: _Rows, sums: _Rows, totals: _Rows) -> Any:
            before = tops[i]
            top, added, weighed = meet(i, j, before)
            less = tf.exp(before - top)
            found = sums[i] * less + added, totals[i] * less + weighed
            return tops.put(i, top), sums.put(i, found[0]), totals.put(i, found[1])

        if self.is_single:
            tops, sums, totals = meet(0, 0)
        else:
            number, size = self.queries.number, self.queries.size
            rows = [number, self.batch, self.kv_heads, self.shared * size]
            tops, sums, totals = self._over_pairs(
                body,
                _Rows.of(tf.fill([*rows, 1], LOWEST_TOP)),
                _Rows.of(tf.zeros([*rows, 1])),
                _Rows.of(tf.zeros([*rows, self.dim])),
            )
        if self.sees_nothing:
            # The output is then 0, not that of other segments.
            sums = tf.where(sums > 0, sums, 1.0)
        output = tf.cast(self._joined(self.queries, totals / sums), dtype or q.dtype)
        # `identity_n` ties both: TensorFlow keeps the logarithms, not the two tensors that they are
        # made of.
        return tuple(tf.identity_n([output, tops + tf.math.log(sums)]))

    def backward(
        self,
        grad: tf.Tensor,
        output: tf.Tensor,
        logs: tf.Tensor,
        q: tf.Tensor,
        k: tf.Tensor,
        v: tf.Tensor,
        table: tf.Tensor | None = None,
    ) -> list[tf.Tensor]:
        """Returns the gradients of queries, keys, values and the table."""
        q, grad = together(q, grad)
        queries, wanted = (self._cut(self.queries, x) for x in (q, grad))
        keys, values = (self._cut(self.keys, x) for x in (k, v))
        # Subtracted from each query's gradients of scores, so that they sum to 0.
        products = tf.cast(grad, tf.float32) * tf.cast(output, tf.float32)
        means = self._cut(self.queries, tf.reduce_sum(products, -1, keepdims=True))
        sums = [logs] if self.is_single else logs

        def meet(i: Any, j: Any) -> list[tf.Tensor]:
            scores, limited = self._scores(i, j, queries[i], keys[j], table)
            weights = tf.exp(scores - sums[i])
            dweights = tf.matmul(wanted[i], values[j], transpose_b=True)
            dscores = weights * (tf.cast(dweights, tf.float32) - means[i])
            low = dscores
            if self.cap is not None:
                # The derivative of the cap, of which `limited` is the result.
                low *= 1 - tf.square(limited / self.cap)
            low = tf.cast(low, q.dtype)
            found = [
                tf.matmul(low, keys[j]),
                tf.matmul(low, queries[i], transpose_a=True),
                tf.matmul(tf.cast(weights, q.dtype), wanted[i], transpose_a=True),
            ]
            return found if table is None else [*found, self._table_gradient(i, j, dscores)]

        def body(i: Any, j: Any, *rows: _Rows) -> Any:
            places = [i, j, j, 0][: len(rows)]
            return [r.add(at, g) for r, at, g in zip(rows, places, meet(i, j), strict=True)]

        inputs = [q, k, v] if table is None else [q, k, v, table]
        if self.is_single:
            found = meet(0, 0)
        else:
            zeros = [_Rows.of(tf.zeros(x.shape)) for x in (queries, keys, values)]
            dtable = [] if table is None else [_Rows.of(tf.zeros([1, *table.shape]))]
            found = self._over_pairs(body, *zeros, *dtable)
            found = [*found[:3], *(rows[0] for rows in found[3:])]
        blocks = self.queries, self.keys, self.keys
        found = [*map(self._joined, blocks, found), *found[3:]]
        # What follows the first of them would begin while scores are held for the others.
        return together(*(tf.cast(g, x.dtype) for g, x in zip(found, inputs, strict=True)))

    def by_token(self, logs: tf.Tensor) -> tf.Tensor:
        """Reorders the logarithms of `forward` to `[batch, length, heads, 1]`."""
        return self._joined(self.queries, logs)

    def by_block(self, logs: tf.Tensor) -> tf.Tensor:
        """Inverts `by_token`, as `backward` takes them."""
        blocks = self._cut(self.queries, logs)
        return blocks[0] if self.is_single else blocks

    def _over_pairs(self, body: Any, *state: _Rows) -> Any:
        """Applies `body(i, j, *state)` to all pairs of blocks, one after the other."""
        if self.offset is None or isinstance(self.offset, int):
            pairs = self.sight.pairs(self.queries, self.keys, self.offset or 0)
            first, second = (tf.constant(numbers) for numbers in zip(*pairs, strict=True))
            number: Any = len(pairs)
        else:
            found = self.sight.pairs_at(self.offset, self.queries, self.keys)
            first, second = tf.unstack(found, axis=1)
            number = tf.size(first)

        def turn(at: tf.Tensor, *handles: tf.Tensor) -> Any:
            buffers = [rows.with_handle(h) for rows, h in zip(state, handles, strict=True)]
            return at + 1, *(rows.handle for rows in body(first[at], second[at], *buffers))

        # One after the other: parallel pairs would need memory for all their scores.
        _, *handles = tf.while_loop(
            lambda at, *_: at < number,
            turn,
            (tf.constant(0), *(rows.handle for rows in state)),
            parallel_iterations=1,
        )
        return [rows.with_handle(h).stacked() for rows, h in zip(state, handles, strict=True)]

    def _scores(
        self, i: Any, j: Any, queries: tf.Tensor, keys: tf.Tensor, table: tf.Tensor | None
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns scores in float32, very low for keys that are not seen, and limited scores."""
        scores = tf.cast(tf.matmul(queries, keys, transpose_b=True), tf.float32)
        scores = limited = capped(scores, self.cap)
        shape = static_sizes(scores)
        distance = self._distance(i, j)
        seen = self.sight.sees(distance)
        if self.segments is not None and self.key_segments is not None:
            query_segments = tf.expand_dims(self.segments[i], 2)
            key_segments = tf.expand_dims(self.key_segments[j], 1)
            same = tf.equal(query_segments, key_segments)
            seen = tf.expand_dims(same if seen is None else seen & same, 1)
            seen = seen if self.shared == 1 else tf.expand_dims(seen, 1)
        if self.shared > 1:
            sizes = [self.queries.size, self.keys.size]
            scores = tf.reshape(scores, [self.batch, self.kv_heads, self.shared, *sizes])
        if table is not None:
            assert self.buckets is not None
            bias = tf.gather(tf.cast(table, tf.float32), self.buckets.of(distance))
            scores += tf.reshape(tf.transpose(bias, [2, 0, 1]), [1, *static_sizes(scores)[1:]])
        scores = scores if seen is None else tf.where(seen, scores, LOW)
        return tf.reshape(scores, shape) if self.shared > 1 else scores, limited

    def _distance(self, i: Any, j: Any) -> tf.Tensor:
        queries, keys = tf.range(self.queries.size), tf.range(self.keys.size)
        distance = tf.expand_dims(queries, 1) - tf.expand_dims(keys, 0)
        if self.offset is not None:
            distance += self.offset
        return distance if i is j else i * self.queries.size - j * self.keys.size + distance

    def _table_gradient(self, i: Any, j: Any, dscores: tf.Tensor) -> tf.Tensor:
        assert self.buckets is not None
        summed = tf.reduce_sum(dscores, 0)
        rows = tf.transpose(tf.reshape(summed, [self.heads, self.queries.size * self.keys.size]))
        places = tf.reshape(self.buckets.of(self._distance(i, j)), [-1])
        return tf.math.unsorted_segment_sum(rows, places, self.buckets.number)

    def _blocks(self, blocks: Blocks, x: tf.Tensor, value: int = 0) -> Any:
        """Cuts `[batch, length, ...]` into blocks."""
        found = blocks.padded(x, value)
        return found if self.is_single else tf.convert_to_tensor(found)

    def _cut(self, blocks: Blocks, x: tf.Tensor) -> Any:
        """Cuts `[batch, length, heads or kv_heads, dim]` into blocks."""
        if self.is_single:
            return [self._heads_first(x)]
        found = self._blocks(blocks, x)
        n, batch, *rest = static_sizes(found)
        x = self._heads_first(tf.reshape(found, [n * batch, *rest]))
        return tf.reshape(x, [n, batch, *static_sizes(x)[1:]])

    def _joined(self, blocks: Blocks, x: tf.Tensor) -> tf.Tensor:
        """Joins blocks of queries or keys to `[batch, length, heads or kv_heads, dim]`."""
        if self.is_single:
            return self._heads_last(blocks, x)
        n, batch, *rest = static_sizes(x)
        x = self._heads_last(blocks, tf.reshape(x, [n * batch, *rest]))
        return blocks.joined(tf.reshape(x, [n, batch, *static_sizes(x)[1:]]))

    def _heads_first(self, x: tf.Tensor) -> tf.Tensor:
        """Reorders `[batch, size, heads, dim]` to `[batch, kv_heads, shared * size, dim]`."""
        batch, size, heads, dim = static_sizes(x)
        if heads == self.kv_heads:
            return tf.transpose(x, [0, 2, 1, 3])
        x = tf.reshape(x, [batch, size, self.kv_heads, self.shared, dim])
        x = tf.transpose(x, [0, 2, 3, 1, 4])
        return tf.reshape(x, [batch, self.kv_heads, self.shared * size, dim])

    def _heads_last(self, blocks: Blocks, x: tf.Tensor) -> tf.Tensor:
        """Inverts `_heads_first`."""
        size = blocks.size
        batch, kv_heads, rows, dim = static_sizes(x)
        if rows == size:
            return tf.transpose(x, [0, 2, 1, 3])
        x = tf.reshape(x, [batch, kv_heads, rows // size, size, dim])
        x = tf.transpose(x, [0, 3, 1, 2, 4])
        return tf.reshape(x, [batch, size, kv_heads * rows // size, dim])


@dataclasses.dataclass(frozen=True)
class _Rows:
    """A list of rows of a float32 tensor; a write copies one row, where a scatter copies all."""

    # A `tf.TensorArray` takes one write for each row in loops of old control flow.

    handle: tf.Tensor
    shape: tuple[int, ...]

    @classmethod
    def of(cls, whole: tf.Tensor) -> _Rows:
        sizes = tuple(static_sizes(whole))
        handle = tf.raw_ops.TensorListFromTensor(tensor=whole, element_shape=sizes[1:])
        return cls(handle, sizes)

    def with_handle(self, handle: tf.Tensor) -> _Rows:
        return _Rows(handle, self.shape)

    def __getitem__(self, at: Any) -> tf.Tensor:
        row = tf.raw_ops.TensorListGetItem(
            input_handle=self.handle,
            index=at,
            element_shape=self.shape[1:],
            element_dtype=tf.float32,
        )
        return tf.ensure_shape(row, self.shape[1:])

    def put(self, at: Any, row: tf.Tensor) -> _Rows:
        return self.with_handle(
            tf.raw_ops.TensorListSetItem(input_handle=self.handle, index=at, item=row)
        )

    def add(self, at: Any, row: tf.Tensor) -> _Rows:
        return self.put(at, self[at] + tf.cast(row, tf.float32))

    def stacked(self) -> tf.Tensor:
        return tf.raw_ops.TensorListStack(
            input_handle=self.handle,
            element_shape=self.shape[1:],
            element_dtype=tf.float32,
            num_elements=self.shape[0],
        )
