"""A tensor with named dims, split over a mesh as the layout rules say."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.mesh import Shape, TensorLayout


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor with named dims; its layout follows from its shape.

    The operators `+ - * / ** -x ~ & | < <= > >=` work element by element and find dims by name.
    `==` compares objects, as Python does; `ops.equal` compares elements.

    Attributes:
        lowering: what lowers it.
        slices: one tensor for each processor that the lowering computes for.
        shape: of the whole tensor.

    Raises:
        LayoutError: the rules split two dims over one axis, or a size does not divide.
        ShapeError: the slices have other sizes.
    """

    lowering: Lowering
    slices: Slices
    shape: Shape

    # NumPy arrays and tf.Tensors on the left leave operators to this class.
    __array_priority__ = 1000

    def __post_init__(self) -> None:
        sizes = self.layout.slice_shape
        for tensor in self.slices:
            if not tensor.shape.is_compatible_with(sizes):
                raise ShapeError(
                    f"a slice of the tensor '{self.layout}' has sizes {list(sizes)}, but a tensor "
                    f"of sizes {tensor.shape} was given"
                )

    @functools.cached_property
    def layout(self) -> TensorLayout:
        """Which dims are split over which axes."""
        return self.lowering.tensor_layout(self.shape)

    @property
    def dtype(self) -> tf.DType:
        """The dtype of the elements."""
        return self.slices[0].dtype

    @property
    def split_axes(self) -> tuple[str, ...]:
        """The axes that a dim is split over; along all others there are copies."""
        return self.layout.split_axes

    def vary(self, axes: Sequence[str]) -> Slices:
        """The slices, made to differ along all of `axes` (see `Lowering.vary`)."""
        lacking = [axis for axis in axes if axis not in self.split_axes]
        return self.lowering.vary(self.slices, lacking)

    def __repr__(self) -> str:
        return f"Tensor('{self.layout}', {self.dtype.name})"

    def __bool__(self) -> bool:
        raise TypeError(
            "a tensor with named dims is neither true nor false; choose between its elements with "
            "ops.where, or export it first: ops.export_tensor(x)"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        # TensorFlow asks for it when an array is on the left, and shows this error.
        raise TypeError(
            "a tensor with named dims is no array; export it (ops.export_tensor), or import the "
            "array beside it (ops.import_tensor), which names its dims"
        )

    def __add__(self, other: Any) -> Tensor:
        return _elementwise().add(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _elementwise().add(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _elementwise().subtract(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _elementwise().subtract(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _elementwise().multiply(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _elementwise().multiply(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _elementwise().divide(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _elementwise().divide(other, self)

    def __pow__(self, other: Any) -> Tensor:
        return _elementwise().power(self, other)

    def __neg__(self) -> Tensor:
        return _elementwise().negative(self)

    def __invert__(self) -> Tensor:
        return _elementwise().logical_not(self)

    def __and__(self, other: Any) -> Tensor:
        return _elementwise().logical_and(self, other)

    def __or__(self, other: Any) -> Tensor:
        return _elementwise().logical_or(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return _elementwise().less(self, other)

    def __le__(self, other: Any) -> Tensor:
        return _elementwise().less_equal(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _elementwise().greater(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _elementwise().greater_equal(self, other)


def _elementwise() -> Any:
    # The operations are made of tensors, so they are loaded after them.
    from pipemesh.lowering.ops import elementwise

    return elementwise


def union_axes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """The axes that any dim of any of the tensors is split over."""
    return tuple(dict.fromkeys(axis for tensor in tensors for axis in tensor.split_axes))


def check_same_dtype(tensors: Sequence[Tensor]) -> None:
    """Raises a ShapeError if tensors that are multiplied have different dtypes."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        dtypes = ", ".join(tensor.dtype.name for tensor in tensors)
        raise ShapeError(f"the operands are of dtypes {dtypes}; ops.cast them to one")


def check_same_lowering(tensors: Sequence[Tensor]) -> Lowering:
    """The lowering of all tensors.

    Raises:
        ShapeError: they have different ones, or there is no tensor.
    """
    if not tensors:
        raise ShapeError("no tensor was given; an operation needs one at least")
    lowerings = {id(tensor.lowering): tensor.lowering for tensor in tensors}
    if len(lowerings) != 1:
        raise ShapeError(
            f"operands belong to {len(lowerings)} lowerings; an operation needs operands of one "
            "lowering, so import them all with it"
        )
    return tensors[0].lowering
