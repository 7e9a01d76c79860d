"""The cache of attention for several groups of rows, in slots; each processor uses one."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.named.cache import CACHE, KeyValueCache, as_rows, overwritten
from pipemesh.layers.named.scope import current_lowering
from pipemesh.lowering import Tensor
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import Dim, Shape


class SlottedCache(KeyValueCache):
    """A `KeyValueCache` of many groups, where processors work on different ones.

    Args:
        length: the number of positions in a row.
        places: `batch;length` of the inputs, a tensor with named dims: on each processor those of
            its current group.
        kept: keys and values by the path of their layer, `[slots, batch, heads, length, head_dim]`
            on each processor; they are overwritten in place.
        slot: int32 scalars, the slot of each processor.
        busy: whether each processor is active; otherwise it overwrites nothing.

    Attributes:
        kept: the cache after the layers that were called.
    """

    def __init__(
        self,
        length: int,
        places: Tensor,
        kept: Mapping[str, tuple[Slices, Slices]],
        slot: Slices,
        busy: Slices,
    ) -> None:
        super().__init__(length, places, kept)
        self._slot, self._busy = slot, busy

    def extend(self, path: str, keys: Tensor, values: Tensor, places: Tensor) -> list[Tensor]:
        """Extends the slot of each processor; see `KeyValueCache.extend`."""
        lowering = current_lowering()
        batch, _, heads, head_dim = keys.shape
        shape = Shape((batch, heads, Dim(CACHE, self.length), head_dim))
        rest = places.slices, self._slot, self._busy
        before = self.kept[path]
        after = (
            lowering.raw_map(_written, before[0], keys.slices, *rest),
            lowering.raw_map(_written, before[1], values.slices, *rest),
        )
        self.kept[path] = after
        return [
            Tensor(
                lowering, lowering.raw_map(lambda kept, slot: kept[slot], part, self._slot), shape
            )
            for part in after
        ]


def _written(
    kept: tf.Tensor, new: tf.Tensor, places: tf.Tensor, slot: tf.Tensor, busy: tf.Tensor
) -> tf.Tensor:
    """Writes to positions of one slot of `[slots, batch, heads, length, head_dim]`."""
    sizes = static_sizes(kept)
    batch, heads, length, dim = sizes[1:]
    first = (slot * batch * heads + tf.range(batch * heads)) * length
    first = tf.reshape(first, [batch, heads, 1])
    at = tf.reshape(first + tf.expand_dims(tf.cast(places, tf.int32), 1), [-1])
    rows = tf.reshape(kept, [-1, dim])
    values = tf.where(busy, as_rows(new), tf.gather(rows, at))
    return tf.reshape(overwritten(rows, at, values), sizes)
