"""The dtypes that layers compute with, and their weights before they are cast to them."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import py_utils


def uncast_theta(layer: Any) -> Any:
    """A layer's weights, and those of its children, in the dtype of their variables.

    Args:
        layer: a lingvo layer.
    """
    theta = py_utils.Transform(uncast_theta, layer.children)
    theta.update(_private(layer))
    return theta


def compute_dtypes(layer: Any) -> Any:
    """For each weight the dtype that its layer's `theta` has it in: each layer has its own.

    Args:
        layer: a lingvo layer.

    Returns:
        Structured as its theta.
    """
    dtypes = py_utils.Transform(compute_dtypes, layer.children)
    p = layer.params

    def of(weight: Any) -> tf.DType:
        own = tf.as_dtype(weight.dtype).base_dtype
        return own if p.fprop_dtype is None or own != p.dtype else tf.as_dtype(p.fprop_dtype)

    dtypes.update(py_utils.Transform(of, _private(layer)))
    return dtypes


def _private(layer: Any) -> Any:
    return py_utils.NestedMap(layer._private_theta) | layer._extra_theta
