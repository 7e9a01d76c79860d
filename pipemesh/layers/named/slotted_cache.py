"""What attention remembers of several groups of rows, in slots: each processor takes one."""

from __future__ import annotations

from collections.abc import Mapping

import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.layers.named.cache import CACHE, KeyValueCache, as_rows, overwritten
from pipemesh.layers.named.scope import current_lowering
from pipemesh.lowering import Tensor
from pipemesh.lowering.primitives import Slices
from pipemesh.mesh import Dim, Shape


class SlottedCache(KeyValueCache):
    """A `KeyValueCache` of many groups, where processors are at different ones.

    Args:
        length: places a row.
        places: `batch;length` of the inputs, a tensor with named dims: on each processor those of
            the group that it is at.
        kept: keys and values by the path of their layer, `[slots, batch, heads, length, head_dim]`
            on each processor; they are overwritten where they lie.
        slot: int32 scalars, the slot that each processor takes.
        busy: whether it is at work; else it overwrites nothing.

    Attributes:
        kept: the same behind the layers that were called.
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
        """As that of a `KeyValueCache`, in the slot of each processor.

        Args:
            path: of the layer.
            keys: `batch;length;heads;head_dim`, under whatever names.
            values: like keys.
            places: `batch;length`, of the same lowering.

        Returns:
            Keys and values, `batch;heads;cache;head_dim`.
        """
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
    """One of `[slots, batch, heads, length, head_dim]`, in which new ones come to their places."""
    sizes = static_sizes(kept)
    batch, heads, length, dim = sizes[1:]
    first = (slot * batch * heads + tf.range(batch * heads)) * length
    first = tf.reshape(first, [batch, heads, 1])
    at = tf.reshape(first + tf.expand_dims(tf.cast(places, tf.int32), 1), [-1])
    rows = tf.reshape(kept, [-1, dim])
    values = tf.where(busy, as_rows(new), tf.gather(rows, at))
    return tf.reshape(overwritten(rows, at, values), sizes)
