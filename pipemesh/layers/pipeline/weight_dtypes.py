"""The dtypes that layers compute with, and their weights before they are cast to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.gradients import custom_gradient
from pipemesh.recurrent.precision import cast_floating


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


def plain_theta(stack: Any, theta: Any, names: Sequence[str]) -> Any:
    """Weights as the layers of a stack compute with them, for where no pipeline does it.

    Their gradients are dense, as those of a pipeline are: of a sparse one in which a row occurs
    twice, lingvo's clipping would take the wrong norm.

    Args:
        stack: the layer that holds the stages.
        theta: its weights.
        names: of the stages.
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
    """The arguments, the first of them in the dtype that the stages compute in.

    Args:
        p: params of the pipeline.
        args: of its `FProp`.
    """
    if not args or args[0] is None or p.nested_map_fprop:
        return args
    return cast_floating(tf.convert_to_tensor(args[0]), p.fprop_dtype), *args[1:]


def _private(layer: Any) -> Any:
    return py_utils.NestedMap(layer._private_theta) | layer._extra_theta
