"""Keys and values that decoding keeps, and attention over them."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import copied, overwritten
from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import setting
from pipemesh.errors import DecodingError, PipelineError
from pipemesh.layers.named.block_attention import CAUSAL, LOW, Buckets, Sight, capped
from pipemesh.layers.named.scope import current_lowering
from pipemesh.lowering import Lowering, Tensor
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import Dim, Shape

# The name of the dim `length` in the cache, which no rule splits.
CACHE = "cache"


class KeyValueCache:
    """Keys and values of rows of tokens, by layer; each row is a separate text.

    Inside `cache_scope` attention treats its inputs as a continuation. It writes their keys and
    values to their positions, and a token sees its row up to its own position. Later positions do
    not count. So tokens after a text's end do no harm if the text is continued from its end.
    Gradients do not pass through the cache: it is for decoding.

    Args:
        length: the number of positions in a row.
        places: `batch;length` of the inputs, int32, from 0 on and below `length`: the position of
            each input. Only those known before the step are checked.
        kept: the `kept` of the previous call; None for the first inputs of the rows.
        last: `batch`, int32: the index of the input of each row for which the head of a language
            model returns logits.
        overwrites: whether to change `kept` in place; valid if nothing else reads it. Otherwise a
            loop copies the whole cache for each token.

    Attributes:
        kept: keys and values by the path of their layer, `batch;heads;cache;head_dim` each, as
            slices on the processors of the lowering; of a memory with its segments, if there are.
        continues: whether there was a previous call.

    Raises:
        DecodingError: a position is outside the cache.

    Example:
        >>> import tensorflow as tf
        >>> from lingvo.core import py_utils
        >>> from pipemesh.layers.named import Attention
        >>> params = Attention.Params().Set(name="attention", input_dim=4, num_heads=2)
        >>> with py_utils.VariableStore():
        ...     layer = params.Instantiate()
        >>> x = tf.random.stateless_normal([1, 3, 4], [1, 2])
        >>> with cache_scope(KeyValueCache(8, tf.constant([[0, 1]]))) as before:
        ...     _ = layer.FPropDefaultTheta(x[:, :2])
        >>> with cache_scope(KeyValueCache(8, tf.constant([[2]]), before.kept)):
        ...     y = layer.FPropDefaultTheta(x[:, 2:])
        >>> whole = layer.FPropDefaultTheta(x)
        >>> bool(tf.reduce_max(abs(y.slices[0][:, 0] - whole.slices[0][:, 2])) < 1e-6)
        True
    """

    def __init__(
        self,
        length: int,
        places: Any,
        kept: Mapping[str, tuple[Slices, ...]] | None = None,
        last: Any = None,
        overwrites: bool = False,
    ) -> None:
        self.length, self.places, self.last = length, places, last
        self._overwrites = overwrites
        self.continues, self.kept = kept is not None, dict(kept or {})
        known = tf.get_static_value(places) if tf.is_tensor(places) else None
        if known is not None and ((known < 0) | (known >= length)).any():
            raise DecodingError(
                f"cache positions are {known.min()} to {known.max()}, but length={length} allows 0 "
                f"to {length - 1}; give a greater length or other positions"
            )

    def extend(self, path: str, keys: Tensor, values: Tensor, places: Tensor) -> list[Tensor]:
        """Adds keys and values to the cache of a layer, and returns all of its keys and values.

        Args:
            path: the path of the layer.
            keys: `batch;length;heads;head_dim`, under any names.
            values: like keys.
            places: `batch;length`, of the same lowering.

        Returns:
            Keys and values, `batch;heads;cache;head_dim`.
        """
        lowering = current_lowering()
        batch, _, heads, head_dim = keys.shape
        shape = Shape((batch, heads, Dim(CACHE, self.length), head_dim))
        kept_keys, kept_values = self.kept.get(path, (None, None))
        self.kept[path] = (
            self._write(lowering, kept_keys, keys.slices, places.slices),
            self._write(lowering, kept_values, values.slices, places.slices),
        )
        return [Tensor(lowering, self._read(lowering, kept), shape) for kept in self.kept[path]]

    def remember(self, path: str, new: Sequence[Slices]) -> Sequence[Slices]:
        """Returns keys and values of a layer's memory, and its segments if there are any.

        `new` are those of new rows, `batch;memory_length;heads;head_dim`; if empty, the kept ones.
        """
        if new:
            lowering, segments = current_lowering(), new[2:]
            self.kept[path] = (*(lowering.map(_heads_first, x) for x in new[:2]), *segments)
        if path not in self.kept:
            raise PipelineError(
                f"{path} sees a memory (cross=True), but the cache has none; give it to the first "
                "call of these rows"
            )
        return self.kept[path]

    def _write(
        self, lowering: Lowering, kept: Slices | None, new: Slices, places: Slices
    ) -> Slices:
        if kept is None:
            kept = lowering.map(self._nothing, new)
        return lowering.map(_written_there if self._overwrites else _written, kept, new, places)

    def _read(self, lowering: Lowering, kept: Slices) -> Slices:
        del lowering
        return kept

    def _nothing(self, like: tf.Tensor) -> tf.Tensor:
        batch, _, heads, head_dim = static_sizes(like)
        return tf.zeros([batch, heads, self.length, head_dim], like.dtype)


def _heads_first(x: tf.Tensor) -> tf.Tensor:
    return tf.transpose(x, [0, 2, 1, 3])


def _written(kept: tf.Tensor, new: tf.Tensor, places: tf.Tensor) -> tf.Tensor:
    """Writes `[batch, length, heads, dim]` to positions of `[batch, heads, cache, dim]`."""
    return _written_there(copied(kept), new, places)


def _written_there(
    kept: tf.Tensor,
    new: tf.Tensor,
    places: tf.Tensor,
    slot: int | tf.Tensor = 0,
    busy: tf.Tensor | None = None,
) -> tf.Tensor:
    """Does the same as `_written`, but changes `kept` in place.

    If `kept` has several slots, writes to one of them, and only if `busy`.
    """
    sizes = static_sizes(kept)
    batch, heads, length, dim = sizes[-4:]
    first = (slot * batch * heads + tf.range(batch * heads)) * length
    first = tf.reshape(first, [batch, heads, 1])
    at = tf.reshape(first + tf.expand_dims(tf.cast(places, tf.int32), 1), [-1])
    rows = tf.reshape(kept, [-1, dim])
    values = tf.reshape(_heads_first(new), [-1, dim])
    if busy is not None:
        values = tf.where(busy, values, tf.gather(rows, at))
    return tf.reshape(overwritten(rows, at, values), sizes)


_current: contextvars.ContextVar[KeyValueCache | None] = contextvars.ContextVar(
    "pipemesh_cache", default=None
)


def cache_scope(cache: KeyValueCache) -> contextlib.AbstractContextManager[KeyValueCache]:
    """Makes attention inside continue a cache and add to it; see `KeyValueCache`.

    Args:
        cache: the cache of the rows.
    """
    return setting(_current, cache)


def current_cache() -> KeyValueCache | None:
    """Returns the cache of the innermost scope, or None outside all scopes."""
    return _current.get()


def continues() -> bool:
    """Returns whether inputs continue the cached rows of a previous call."""
    cache = current_cache()
    return cache is not None and cache.continues


class SlottedCache(KeyValueCache):
    """A `KeyValueCache` of many groups, where processors work on different ones.

    `places` and `slot` are those of each processor's current group. A processor that is not `busy`
    overwrites nothing. `kept` is `[slots, batch, heads, length, head_dim]` on each processor and is
    overwritten in place.
    """

    def __init__(
        self,
        length: int,
        places: Tensor,
        kept: Mapping[str, tuple[Slices, ...]],
        slot: Slices,
        busy: Slices,
    ) -> None:
        super().__init__(length, places, kept)
        self._slot, self._busy = slot, busy

    def remember(self, path: str, new: Sequence[Slices]) -> Sequence[Slices]:
        """Refuses a memory."""
        raise DecodingError(
            f"{path} sees a memory (cross=True), which lowering='simd' cannot decode; set "
            "lowering='placement'"
        )

    def _write(
        self, lowering: Lowering, kept: Slices | None, new: Slices, places: Slices
    ) -> Slices:
        assert kept is not None
        return lowering.raw_map(_written_there, kept, new, places, self._slot, self._busy)

    def _read(self, lowering: Lowering, kept: Slices) -> Slices:
        return lowering.raw_map(lambda slots, slot: slots[slot], kept, self._slot)


def cached_attention(
    q: tf.Tensor,
    k: tf.Tensor,
    v: tf.Tensor,
    places: tf.Tensor | None = None,
    segments: tf.Tensor | None = None,
    table: tf.Tensor | None = None,
    buckets: Buckets | None = None,
    sight: Sight = CAUSAL,
    cap: float | None = None,
    key_segments: tf.Tensor | None = None,
) -> tf.Tensor:
    """Averages the values that each query sees: those up to its own position, or of its segment.

    Queries are scaled and `[batch, length, heads, dim]`, keys and values `[batch, kv_heads, cache,
    dim]`: `heads / kv_heads` neighbouring heads share one. `places`, `[batch, length]` int32, are
    the positions of queries in the cache; None for a memory. The rest is as in `block_attention`.
    """
    batch, length, heads, dim = static_sizes(q)
    kv_heads, cache = static_sizes(k)[1:3]
    shared = heads // kv_heads
    # Heads that share keys are rows of one matmul.
    queries = tf.reshape(q, [batch, length, kv_heads, shared, dim])
    queries = tf.reshape(tf.transpose(queries, [0, 2, 3, 1, 4]), [batch, kv_heads, -1, dim])
    scores = tf.cast(tf.matmul(queries, k, transpose_b=True), tf.float32)
    scores = tf.reshape(capped(scores, cap), [batch, kv_heads, shared, length, cache])
    seen = distance = None
    if places is not None:
        distance = tf.expand_dims(places, 2) - tf.range(cache)
        seen = sight.sees(distance)
    elif key_segments is not None:
        segments = tf.zeros([batch, length], tf.int32) if segments is None else segments
        seen = tf.equal(tf.expand_dims(segments, 2), tf.expand_dims(key_segments, 1))
    if table is not None:
        assert buckets is not None and distance is not None
        bias = tf.gather(tf.cast(table, tf.float32), buckets.of(distance))
        bias = tf.reshape(bias, [batch, length, cache, kv_heads, shared])
        scores += tf.transpose(bias, [0, 3, 4, 1, 2])
    if seen is not None:
        seen = tf.reshape(seen, [batch, 1, 1, length, cache])
        scores = tf.where(seen, scores, LOW)
    weights = tf.nn.softmax(scores)
    if seen is not None and key_segments is not None:
        # A segment may have no key.
        weights = tf.where(seen, weights, 0.0)
    weights = tf.reshape(tf.cast(weights, v.dtype), [batch, kv_heads, shared * length, cache])
    values = tf.reshape(tf.matmul(weights, v), [batch, kv_heads, shared, length, dim])
    return tf.reshape(tf.transpose(values, [0, 3, 1, 2, 4]), [batch, length, heads, dim])
