"""The dtypes that layers compute in, and their weights before the cast."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.gradients import custom_gradient
from pipemesh.recurrent.options import cast_floating


def uncast_theta(layer: Any) -> Any:
    """Returns the weights of a layer and its children in the dtype of their variables."""
    theta = py_utils.Transform(uncast_theta, layer.children)
    theta.update(_private(layer))
    return theta


def compute_dtypes(layer: Any) -> Any:
    """Returns the dtype of each weight in its layer's `theta`, nested as the theta."""
    dtypes = py_utils.Transform(compute_dtypes, layer.children)
    p = layer.params

    def of(weight: Any) -> tf.DType:
        own = tf.as_dtype(weight.dtype).base_dtype
        return own if p.fprop_dtype is None or own != p.dtype else tf.as_dtype(p.fprop_dtype)

    dtypes.update(py_utils.Transform(of, _private(layer)))
    return dtypes


def plain_theta(stack: Any, theta: Any, names: Sequence[str]) -> Any:
    """Returns weights as the layers of a stack compute with them, without a pipeline.

    Their gradients are dense, as in a pipeline. lingvo's clipping computes the wrong norm of a
    sparse gradient in which a row occurs twice.
    """

    def plain(weight: Any, dtype: tf.DType) -> Any:
        if not stack.do_eval and weight.dtype.is_floating:
            weight = _with_dense_gradient(weight)
        return cast_floating(weight, dtype)

    ready = {
        name: py_utils.Transform(plain, theta[name], compute_dtypes(stack.children[name]))
        for name in names
    }
    return py_utils.NestedMap({**theta, **ready})


@custom_gradient
def _with_dense_gradient(weight: tf.Tensor) -> Any:
    return tf.identity(weight), tf.convert_to_tensor


def cast_first(p: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the first argument to the dtype that the stages compute in."""
    if not args or args[0] is None or p.nested_map_fprop:
        return args
    return cast_floating(tf.convert_to_tensor(args[0]), p.fprop_dtype), *args[1:]


def _private(layer: Any) -> Any:
    return py_utils.NestedMap(layer._private_theta) | layer._extra_theta
