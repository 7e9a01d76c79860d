"""What a lowering is given: a mesh, layout rules, and tensors that are to be cut."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.mesh import LayoutRules, TensorLayout


def check_rules(rules: Any) -> None:
    """Raises a LayoutError unless they are layout rules."""
    if not isinstance(rules, LayoutRules):
        raise LayoutError(
            f"the layout rules are {rules!r}; write LayoutRules.from_text('batch:data'), or "
            "LayoutRules() for none"
        )


def check_real(dtype: tf.DType, what: str) -> None:
    """Checks that elements are real numbers or booleans.

    The gradient of a complex tensor would depend on the layout.

    Args:
        dtype: of the elements.
        what: has this dtype.

    Raises:
        ShapeError: they are complex.
    """
    if dtype.is_complex:
        raise ShapeError(
            f"{what} is {dtype.name}; elements are real numbers or booleans. Use two tensors, "
            "tf.math.real(z) and tf.math.imag(z)"
        )


def whole_tensor(tensor: Any, layout: TensorLayout) -> tf.Tensor:
    """A tensor that is to be cut, of the sizes that its layout says.

    Slices of a batch whose size is only known when the program runs would otherwise leave out the
    rows behind the last slice.

    Args:
        tensor: a tensor or array; sizes that are not known yet are checked when they are.
        layout: of the whole tensor.

    Raises:
        ShapeError: it has other sizes, or is complex.
    """
    tensor = tf.convert_to_tensor(tensor)
    shape = layout.shape
    check_real(tensor.dtype, f"a tensor of shape '{shape}'")
    if not tensor.shape.is_compatible_with(shape.sizes):
        raise ShapeError(f"a tensor of sizes {tensor.shape} cannot have the shape '{shape}'")
    if tensor.shape.is_fully_defined():
        return tensor
    # TensorFlow's error shows the name.
    sizes = ".".join(f"{dim.name}_{dim.size}" for dim in shape)
    return tf.ensure_shape(tensor, shape.sizes, name=f"import_tensor_{sizes}")
