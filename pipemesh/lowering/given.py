"""Checks of a lowering's inputs: mesh, layout rules and whole tensors."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.mesh import LayoutRules, TensorLayout


def check_rules(rules: Any) -> None:
    """Raises a LayoutError unless the value is a `LayoutRules`."""
    if not isinstance(rules, LayoutRules):
        raise LayoutError(
            f"the layout rules are {rules!r}; write LayoutRules.from_text('batch:data'), or "
            "LayoutRules() for none"
        )


def check_real(dtype: tf.DType, what: str) -> None:
    """Checks for real numbers or booleans: complex gradients would depend on the layout."""
    if dtype.is_complex:
        raise ShapeError(
            f"{what} is {dtype.name}; elements are real numbers or booleans. Use two tensors, "
            "tf.math.real(z) and tf.math.imag(z)"
        )


def whole_tensor(tensor: Any, layout: TensorLayout) -> tf.Tensor:
    """Converts a whole tensor and checks its dtype and sizes, at run time if they are unknown."""
    tensor = tf.convert_to_tensor(tensor)
    shape = layout.shape
    check_real(tensor.dtype, f"a tensor of shape '{shape}'")
    if not tensor.shape.is_compatible_with(shape.sizes):
        raise ShapeError(f"a tensor of sizes {tensor.shape} cannot have the shape '{shape}'")
    if tensor.shape.is_fully_defined():
        return tensor
    # The name appears in TensorFlow's error.
    sizes = ".".join(f"{dim.name}_{dim.size}" for dim in shape)
    return tf.ensure_shape(tensor, shape.sizes, name=f"import_tensor_{sizes}")
