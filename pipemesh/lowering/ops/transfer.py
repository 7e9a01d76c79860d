"""Transfer of whole tensors into the mesh and out of it."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from pipemesh.lowering.arguments import as_shape as as_shape
from pipemesh.lowering.lowering import Lowering
from pipemesh.lowering.registry import register
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Shape


@register("transfer")
def import_tensor(lowering: Lowering, tensor: Any, shape: Shape | str) -> Tensor:
    """Cuts a whole tensor into slices.

    Args:
        lowering: the lowering of the new tensor.
        tensor: a tensor or array with the sizes of `shape`. Sizes that TensorFlow does not know yet
            are checked when the program runs. In SIMD every core has the whole tensor.
        shape: names for its dims, for example `"batch:100;io:3"`.

    Raises:
        ShapeError: the sizes differ.
        LayoutError: the rules cannot split the tensor.
    """
    shape = as_shape(shape)
    return Tensor(lowering, lowering.import_tensor(tensor, lowering.tensor_layout(shape)), shape)


@register("transfer", "all_gather")
def export_tensor(x: Tensor) -> tf.Tensor:
    """Joins the slices to the whole tensor, on the first device or on every core.

    Args:
        x: any tensor.
    """
    x.lowering.warn_of_misspelt_rules()
    return x.lowering.export_tensor(x.slices, x.layout)
