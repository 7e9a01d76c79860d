"""The state of an iterator over a `tf.data.Dataset`, as a tensor."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# An operation with state outside of the iterator cannot be saved.
_FAIL = 2


def iterator_state(iterator: Any) -> tf.Tensor:
    """Where an iterator is, for a checkpoint.

    Args:
        iterator: made eagerly by `iter(dataset)`.

    Returns:
        A vector of variants, which `SaveV2` writes.

    Raises:
        tf.errors.OpError: the dataset has state that cannot be saved.
    """
    return tf.raw_ops.SerializeIterator(
        resource_handle=iterator._iterator_resource, external_state_policy=_FAIL
    )


def set_iterator_state(iterator: Any, state: tf.Tensor) -> None:
    """Puts an iterator where another one over an equal dataset was.

    Args:
        iterator: made eagerly by `iter(dataset)`.
        state: as `iterator_state` returns it.

    Raises:
        tf.errors.OpError: the state is that of another dataset.
    """
    tf.raw_ops.DeserializeIterator(resource_handle=iterator._iterator_resource, serialized=state)


def is_iterator(value: Any) -> bool:
    """Whether a value is such an iterator."""
    return hasattr(value, "_iterator_resource")
