"""Tensors with named dims, split over a mesh by the layout rules."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.backend.structure import in_loop_check, nested_type
from pipemesh.errors import ShapeError
from pipemesh.lowering.lowering import Lowering, Slices, check_real
from pipemesh.lowering.registry import OPS
from pipemesh.mesh import Shape, TensorLayout


@dataclasses.dataclass(frozen=True, eq=False)
class Tensor:
    """A tensor with named dims; the layout rules determine its layout from its shape.

    The operators `+ - * / // % ** -x ~ & | ^ == != < <= > >=` and `abs` work element by element and
    find dims by name. Hashes are by identity, so tensors may be keys; `is` compares objects.

    `tf.nest` sees the slices, so `tape.watch` and `tape.gradient` accept a tensor as a whole (see
    `ops.gradients`). The gradient of a single slice, as in `tape.gradient(x.slices[0], ...)`, is
    that of one processor. Under placement it is a part of the whole gradient.

    Attributes:
        lowering: the lowering of this tensor.
        slices: one tensor per processor that the lowering computes for. Sizes that TensorFlow does
            not know yet are checked when the program runs.
        shape: the shape of the whole tensor.

    Raises:
        LayoutError: the rules split two dims over one axis, or a size does not divide.
        ShapeError: the slices have other sizes.
    """

    lowering: Lowering
    slices: Slices
    shape: Shape

    # Makes NumPy arrays and tf.Tensors on the left defer operators to this class.
    __array_priority__ = 1000

    def __post_init__(self) -> None:
        if not isinstance(self.lowering, Lowering) or not isinstance(self.shape, Shape):
            raise ShapeError(
                f"a tensor is made of a lowering, slices and a Shape, but {self.lowering!r} and "
                f"{self.shape!r} were given as lowering and Shape; ops.import_tensor makes one of "
                "a whole tensor; a text becomes a Shape with Shape.from_text"
            )
        if not isinstance(self.slices, list | tuple) or len(self.slices) != (
            self.lowering.num_slices
        ):
            raise ShapeError(
                f"the tensor '{self.layout}' is made of a tuple of {self.lowering.num_slices} "
                "slices, one for each processor; ops.import_tensor cuts a whole tensor into slices"
            )
        sizes = self.layout.slice_shape
        for tensor in self.slices:
            if not isinstance(tensor, tf.Tensor):
                raise ShapeError(
                    f"a slice of the tensor '{self.layout}' is {tensor!r}; slices are tensors of "
                    "TensorFlow: ops.import_tensor makes them"
                )
            check_real(tensor.dtype, f"a slice of the tensor '{self.layout}'")
            if not tensor.shape.is_compatible_with(sizes):
                raise ShapeError(
                    f"a slice of the tensor '{self.layout}' has sizes {list(sizes)}, but a tensor "
                    f"of sizes {tensor.shape} was given"
                )
        if not all(tensor.shape.is_fully_defined() for tensor in self.slices):
            checked = self.lowering.map(lambda slice_: tf.ensure_shape(slice_, sizes), self.slices)
            object.__setattr__(self, "slices", checked)

    def __tf_flatten__(self) -> tuple[Any, tuple[tf.Tensor, ...]]:
        return (self.lowering, self.shape), tuple(self.slices)

    def __tf_tracing_type__(self, context: Any) -> Any:
        # Because of `__array__`, a `tf.function` would treat it as an array.
        return nested_type(self, context)

    @classmethod
    def __tf_unflatten__(cls, metadata: Any, components: tuple[Any, ...]) -> Any:
        lowering, shape = metadata
        if all(component is None for component in components) and not in_loop_check():
            # The gradient if no result depends on the tensor.
            return None
        found = [component for component in components if component is not None]
        if not found or not all(isinstance(part, tf.Tensor | tf.IndexedSlices) for part in found):
            # Loops pack specs and names in the structure of their variables.
            packed = object.__new__(cls)
            packed.__dict__.update(lowering=lowering, slices=tuple(components), shape=shape)
            return packed
        sizes = lowering.tensor_layout(shape).slice_shape

        def dense(part: Any) -> tf.Tensor:
            # Gradients of lookups are sparse.
            return tf.zeros(sizes, found[0].dtype) if part is None else tf.convert_to_tensor(part)

        return Tensor(lowering, lowering.raw_map(dense, components), shape)

    @functools.cached_property
    def layout(self) -> TensorLayout:
        """Returns the layout: which dims are split over which axes."""
        return self.lowering.tensor_layout(self.shape)

    @property
    def dtype(self) -> tf.DType:
        """Returns the dtype of the elements."""
        return self.slices[0].dtype

    @property
    def split_axes(self) -> tuple[str, ...]:
        """Returns the axes that split a dim; along all others, processors hold copies."""
        return self.layout.split_axes

    def vary(self, axes: Sequence[str]) -> Slices:
        """Returns the slices, made to differ along all of `axes` (see `Lowering.vary`)."""
        lacking = [axis for axis in axes if axis not in self.split_axes]
        return self.lowering.vary(self.slices, lacking)

    def __repr__(self) -> str:
        dtype = getattr(self.slices[0], "dtype", None)
        return f"Tensor('{self.layout}', {self.slices[0] if dtype is None else dtype.name})"

    def __bool__(self) -> bool:
        raise TypeError(
            "a tensor with named dims is neither true nor false; choose between its elements with "
            "ops.where, or export it first: ops.export_tensor(x)"
        )

    def __array__(self, *args: Any, **kwargs: Any) -> Any:
        # TensorFlow calls it for an array on the left, and shows this error.
        raise TypeError(
            "a tensor with named dims is no array; use the operation of its name in ops, export it "
            "(ops.export_tensor), or import the array beside it (ops.import_tensor)"
        )

    def numpy(self) -> np.ndarray:
        """Returns the whole tensor as an array, outside of graphs.

        SIMD gathers it, so all cores have to call this method.

        Raises:
            TypeError: called while a graph is built, where tensors have no values yet.
        """
        self.lowering.warn_of_misspelt_rules()
        whole = self.lowering.export_tensor(self.slices, self.layout)
        if not hasattr(whole, "numpy"):
            raise TypeError(
                f"{self!r} has no value while a graph is built; return ops.export_tensor(x) from "
                "the graph's function, and read what it returns"
            )
        return whole.numpy()

    def __getitem__(self, key: Any) -> Any:
        raise TypeError(
            "a tensor with named dims has no positions; take rows by the name of their dim: "
            "ops.slice(x, 'batch', 0, 1), or ops.unstack(x, 'batch')[0]"
        )

    def __iter__(self) -> Any:
        raise TypeError(
            "a tensor with named dims has no first dim to go along; ops.unstack(x, 'batch') gives "
            "its rows along a dim"
        )

    def __len__(self) -> int:
        raise TypeError(
            f"{self!r}, a tensor with named dims, has no length; x.shape['batch'].size is the size "
            "of a dim, x.shape.sizes are all"
        )

    def __int__(self) -> int:
        return int(self._number())

    def __format__(self, spec: str) -> str:
        return format(self._number(), spec) if spec else repr(self)

    def __float__(self) -> float:
        return float(self._number())

    def _number(self) -> Any:
        if len(self.shape):
            raise TypeError(
                f"{self!r} has named dims, so it is no number; reduce it to one (ops.reduce_sum, "
                "ops.reduce_mean), or read all of it with x.numpy()"
            )
        return self.numpy().item()

    # An operator that compares elements would replace this method.
    __hash__ = object.__hash__

    def __eq__(self, other: Any) -> Any:
        return _op("equal")(self, _comparable(other))

    def __ne__(self, other: Any) -> Any:
        return _op("not_equal")(self, _comparable(other))

    def __add__(self, other: Any) -> Tensor:
        return _op("add")(self, other)

    def __radd__(self, other: Any) -> Tensor:
        return _op("add")(other, self)

    def __sub__(self, other: Any) -> Tensor:
        return _op("subtract")(self, other)

    def __rsub__(self, other: Any) -> Tensor:
        return _op("subtract")(other, self)

    def __mul__(self, other: Any) -> Tensor:
        return _op("multiply")(self, other)

    def __rmul__(self, other: Any) -> Tensor:
        return _op("multiply")(other, self)

    def __truediv__(self, other: Any) -> Tensor:
        return _op("divide")(self, other)

    def __rtruediv__(self, other: Any) -> Tensor:
        return _op("divide")(other, self)

    def __matmul__(self, other: Any) -> Tensor:
        raise TypeError(
            "tensors with named dims are multiplied by name: ops.einsum([x, w], ['batch', 'out']) "
            "sums over the dims that the result lacks"
        )

    __rmatmul__ = __matmul__

    def __pow__(self, other: Any) -> Tensor:
        return _op("power")(self, other)

    def __rpow__(self, other: Any) -> Tensor:
        return _op("power")(other, self)

    def __floordiv__(self, other: Any) -> Tensor:
        return _op("floor_divide")(self, other)

    def __rfloordiv__(self, other: Any) -> Tensor:
        return _op("floor_divide")(other, self)

    def __mod__(self, other: Any) -> Tensor:
        return _op("floor_mod")(self, other)

    def __rmod__(self, other: Any) -> Tensor:
        return _op("floor_mod")(other, self)

    def __abs__(self) -> Tensor:
        return _op("abs")(self)

    def __neg__(self) -> Tensor:
        return _op("negative")(self)

    def __invert__(self) -> Tensor:
        return _op("logical_not")(self)

    def __and__(self, other: Any) -> Tensor:
        return _op("logical_and")(self, other)

    def __or__(self, other: Any) -> Tensor:
        return _op("logical_or")(self, other)

    def __xor__(self, other: Any) -> Tensor:
        return _op("logical_xor")(self, other)

    def __lt__(self, other: Any) -> Tensor:
        return _op("less")(self, other)

    def __le__(self, other: Any) -> Tensor:
        return _op("less_equal")(self, other)

    def __gt__(self, other: Any) -> Tensor:
        return _op("greater")(self, other)

    def __ge__(self, other: Any) -> Tensor:
        return _op("greater_equal")(self, other)


def _comparable(other: Any) -> Any:
    kinds = (Tensor, tf.Tensor, tf.Variable, np.ndarray, np.generic, int, float, complex, list)
    if not isinstance(other, kinds):
        raise TypeError(
            f"a tensor with named dims is compared, element by element, with tensors and numbers, "
            f"not with {getattr(other, 'name', other)!r}; `is` compares objects"
        )
    return other


def _op(name: str) -> Callable[..., Any]:
    return OPS[name].function


def union_axes(tensors: Sequence[Tensor]) -> tuple[str, ...]:
    """Returns the axes that split any dim of any of the tensors."""
    return tuple(dict.fromkeys(axis for tensor in tensors for axis in tensor.split_axes))


def check_same_dtype(tensors: Sequence[Tensor]) -> None:
    """Raises a ShapeError if tensors that are multiplied have different dtypes."""
    if len({tensor.dtype for tensor in tensors}) > 1:
        dtypes = ", ".join(tensor.dtype.name for tensor in tensors)
        raise ShapeError(f"the operands are of dtypes {dtypes}; ops.cast them to one")


def check_same_lowering(tensors: Sequence[Tensor]) -> Lowering:
    """Returns the lowering of all tensors, or raises a ShapeError if there is not exactly one."""
    if not tensors:
        raise ShapeError("no tensor was given; an operation needs one at least")
    lowerings = {id(tensor.lowering): tensor.lowering for tensor in tensors}
    if len(lowerings) != 1:
        raise ShapeError(
            f"operands belong to {len(lowerings)} lowerings; an operation needs operands of one "
            "lowering, so import them all with it"
        )
    return tensors[0].lowering
