"""Elementwise operations with broadcasting by name."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering.arguments import check_operands, register
from pipemesh.lowering.ops.relayout import import_tensor
from pipemesh.lowering.registry import OPS
from pipemesh.lowering.tensor import Tensor, check_same_lowering, union_axes
from pipemesh.mesh import Shape

Operand = Any  # A Tensor, or a number: from Python or NumPy, or a 0-d tf.Tensor.


def in_order(tensor: tf.Tensor, order: Sequence[int]) -> tf.Tensor:
    """Reorders the dims of a tensor; returns the tensor itself if the order is the same."""
    return tensor if list(order) == sorted(order) else tf.transpose(tensor, order)


def align(tensor: tf.Tensor, names: Sequence[str], wanted: Sequence[str]) -> tf.Tensor:
    """Reorders the dims of a slice, and inserts dims of size 1 for missing ones."""
    # Missing leading dims are left out: broadcasting adds them, and its gradient is one sum.
    present = [name for name in wanted if name in names]
    tensor = in_order(tensor, [names.index(name) for name in present])
    wanted = wanted[wanted.index(present[0]) :] if present else []
    if len(present) == len(wanted):
        return tensor
    sizes = iter(tensor.shape.as_list())
    return tf.reshape(tensor, [next(sizes) if name in present else 1 for name in wanted])


def union_shape(shapes: Sequence[Shape]) -> Shape:
    """Returns the shape of the first operand that has all dims; if none has, the dims from left to
    right.
    """
    union = functools.reduce(operator.or_, shapes)
    return next((shape for shape in shapes if len(shape) == len(union)), union)


def broadcast(
    function: Callable[..., tf.Tensor], operands: Sequence[Operand], shape: Shape | None = None
) -> Tensor:
    """Applies a local function that broadcasts as NumPy does to tensors and numbers."""
    # Numbers take the dtype of the first tensor that is not boolean. TensorFlow's scalars and
    # variables get a gradient like imported ones.
    for operand in operands:
        if not isinstance(operand, Tensor) and np.ndim(operand) > 0:
            raise ShapeError(
                f"an array of shape {tuple(np.shape(operand))} has no named dims to be "
                "split by like a tensor; name them: ops.import_tensor(lowering, array, 'dim:size')"
            )
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    lowering = check_same_lowering(tensors)
    number_dtype = next((x.dtype for x in tensors if x.dtype != tf.bool), tf.bool)
    operands = [
        import_tensor(lowering, tf.convert_to_tensor(operand, number_dtype), Shape())
        if isinstance(operand, tf.Tensor | tf.Variable)
        else operand
        for operand in operands
    ]
    tensors = [operand for operand in operands if isinstance(operand, Tensor)]
    union = union_shape([tensor.shape for tensor in tensors])
    if shape is not None and set(shape) != set(union):
        raise ShapeError(f"the result has the dims '{union}', but '{shape}' was asked for")
    shape = shape or union
    lowering.tensor_layout(shape)
    axes = union_axes(tensors)

    def local(*slices: tf.Tensor) -> tf.Tensor:
        rest = iter(slices)
        args = [
            align(next(rest), operand.shape.names, shape.names)
            if isinstance(operand, Tensor)
            else tf.convert_to_tensor(operand, number_dtype)
            for operand in operands
        ]
        return function(*args)

    slices = lowering.map(local, *(tensor.vary(axes) for tensor in tensors))
    return Tensor(lowering, slices, shape)


def _unary(
    name: str, function: Callable[[tf.Tensor], tf.Tensor], what: str, flops: int | None = None
) -> Callable[..., Any]:
    def op(x: Tensor) -> Tensor:
        return Tensor(x.lowering, x.lowering.map(function, x.slices, flops=flops), x.shape)

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return register("elementwise", arguments="Args:\n    x: any tensor of a fitting dtype.")(op)


_register_binary = register(
    "elementwise",
    arguments="""Args:
    a: a tensor or a number.
    b: the same; at least one of them is a tensor.

Returns:
    Dims in the order of the first operand that has all; if none has, from left to right.

Raises:
    ShapeError: a name has two sizes, or the dtypes differ.
    LayoutError: the rules split two dims of the result over one axis.""",
)


def _binary(name: str, function: Callable[..., tf.Tensor], what: str) -> Callable[..., Any]:
    def op(a: Operand, b: Operand) -> Tensor:
        check_operands(name, [a, b])
        return broadcast(function, [a, b])

    op.__name__ = op.__qualname__ = name
    op.__doc__ = what
    return _register_binary(op)


abs = _unary("abs", tf.abs, "Absolute values.")
ceil = _unary("ceil", tf.math.ceil, "Rounds up.")
cos = _unary("cos", tf.cos, "Cosines of angles in radians.")
erf = _unary("erf", tf.math.erf, "Gauss error function.")
exp = _unary("exp", tf.exp, "Powers of e.")
floor = _unary("floor", tf.math.floor, "Rounds down.")
gelu = _unary("gelu", tf.nn.gelu, "Gaussian error linear unit, exact (not by tanh).")
is_finite = _unary("is_finite", tf.math.is_finite, "True where elements are neither inf nor NaN.")
is_nan = _unary("is_nan", tf.math.is_nan, "True where elements are NaN.")
log = _unary("log", tf.math.log, "Natural logarithms.")
log1p = _unary("log1p", tf.math.log1p, "Natural logarithms of 1 + x.")
logical_not = _unary("logical_not", tf.logical_not, "Negates booleans.")
negative = _unary("negative", tf.negative, "Changes signs.")
reciprocal = _unary("reciprocal", lambda x: 1 / x, "1 / x.")
relu = _unary("relu", tf.nn.relu, "Rectified linear unit.")
round = _unary("round", tf.round, "Rounds to the nearest integer, halves to even ones.")
rsqrt = _unary("rsqrt", tf.math.rsqrt, "1 / square root.")
sigmoid = _unary("sigmoid", tf.sigmoid, "Logistic function.")
sign = _unary("sign", tf.sign, "Signs: -1, 0 or 1.")
silu = _unary("silu", lambda x: tf.nn.silu(x, 1.0), "x times its logistic function (swish).")
sin = _unary("sin", tf.sin, "Sines of angles in radians.")
softplus = _unary("softplus", tf.math.softplus, "log(1 + exp(x)).")
sqrt = _unary("sqrt", tf.sqrt, "Square roots.")
square = _unary("square", tf.square, "Squares.")
stop_gradient = _unary("stop_gradient", tf.stop_gradient, "The same values, without gradient.", 0)
tanh = _unary("tanh", tf.tanh, "Hyperbolic tangents.")

add = _binary("add", tf.add, "a + b.")
equal = _binary("equal", tf.equal, "a == b.")
floor_divide = _binary("floor_divide", tf.math.floordiv, "a / b, rounded down.")
floor_mod = _binary("floor_mod", tf.math.floormod, "The remainder of a division rounded down.")
greater = _binary("greater", tf.greater, "a > b.")
greater_equal = _binary("greater_equal", tf.greater_equal, "a >= b.")
less = _binary("less", tf.less, "a < b.")
less_equal = _binary("less_equal", tf.less_equal, "a <= b.")
logical_and = _binary("logical_and", tf.logical_and, "True where both are true.")
logical_or = _binary("logical_or", tf.logical_or, "True where one or both are true.")
logical_xor = _binary("logical_xor", tf.math.logical_xor, "True where exactly one is true.")
maximum = _binary("maximum", tf.maximum, "The greater of both.")
minimum = _binary("minimum", tf.minimum, "The smaller of both.")
multiply = _binary("multiply", tf.multiply, "a * b.")
not_equal = _binary("not_equal", tf.not_equal, "a != b.")
power = _binary("power", tf.pow, "a to the power of b.")
squared_difference = _binary(
    "squared_difference", tf.math.squared_difference, "The square of a - b."
)
subtract = _binary("subtract", tf.subtract, "a - b.")


def _floating(operand: Operand) -> Operand:
    """Converts integers to float32: TensorFlow would use float64, which TPUs do not support."""
    if isinstance(operand, Tensor) and operand.dtype.is_integer:
        return cast(operand, tf.float32)
    if isinstance(operand, tf.Tensor | tf.Variable) and operand.dtype.is_integer:
        return tf.cast(operand, tf.float32)
    return operand


@_register_binary
def divide(a: Operand, b: Operand) -> Tensor:
    """a / b; IEEE for 0: inf or NaN; float32 if both are integers."""
    if all(isinstance(operand, Tensor | tf.Tensor | tf.Variable) for operand in (a, b)):
        check_operands("divide", [a, b])
    a, b = _floating(a), _floating(b)
    check_operands("divide", [a, b])
    return broadcast(tf.math.divide, [a, b])


@register("elementwise")
def where(condition: Tensor, a: Operand, b: Operand) -> Tensor:
    """Selects elements of `a` where `condition` is true, of `b` elsewhere.

    Args:
        condition: booleans.
        a: a tensor or a number.
        b: the same; at least one of them is a tensor.

    Returns:
        Dims in the order of the first of `a`, `b` and `condition` that has all; if none has, from
        left to right.

    Raises:
        ShapeError: a name has two sizes.
        LayoutError: the rules split two dims of the result over one axis.
    """
    check_operands("where", [a, b])
    shapes = [operand.shape for operand in (a, b, condition) if isinstance(operand, Tensor)]
    return broadcast(tf.where, [condition, a, b], union_shape(shapes) if shapes else None)


@register("elementwise")
def cast(x: Tensor, dtype: tf.DType) -> Tensor:
    """Converts elements to a dtype, as `tf.cast` does.

    Args:
        dtype: the new dtype.
    """
    if x.dtype == dtype:
        return x
    slices = x.lowering.map(lambda slice_: tf.cast(slice_, dtype), x.slices)
    return Tensor(x.lowering, slices, x.shape)


@register("elementwise")
def broadcast_to(x: Tensor, shape: Shape) -> Tensor:
    """Repeats a tensor along the dims that it lacks.

    Args:
        shape: contains all dims of `x`, in any order.

    Raises:
        ShapeError: `shape` lacks a dim of `x`.
        LayoutError: the rules cannot split the result.
    """
    if not x.shape <= shape:
        raise ShapeError(
            f"'{x.shape}' cannot be broadcast to '{shape}', which lacks '{x.shape - shape}'"
        )
    layout = x.lowering.tensor_layout(shape)
    sizes = layout.slice_shape

    def local(slice_: tf.Tensor) -> tf.Tensor:
        return tf.broadcast_to(align(slice_, x.shape.names, shape.names), sizes)

    slices = x.lowering.map(local, x.vary(layout.split_axes), flops=0)
    return Tensor(x.lowering, slices, shape)


# `ops` has these names.
__all__ = [  # pyright: ignore[reportUnsupportedDunderAll]
    name for name, op in OPS.items() if op.group == "elementwise"
]
