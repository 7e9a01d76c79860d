"""Shapes that are known before anything runs."""

from __future__ import annotations

import tensorflow as tf


def static_sizes(value: tf.Tensor | tf.TensorSpec) -> list[int]:
    """The size of each dim of something whose shape is known whole."""
    sizes = value.shape.as_list()
    known = [size for size in sizes if size is not None]
    assert len(known) == len(sizes), f"a static shape is needed, not {value.shape}"
    return known
