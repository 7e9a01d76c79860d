"""Cases of operations that work element by element."""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import Shape
from tests.lowering.cases.case import Case, booleans, integers, numbers

X = "x:4;y:8;z:2"

_POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal"}
_SAME_NAMES = (
    "abs ceil cos erf exp floor is_finite is_nan log log1p negative reciprocal round rsqrt sigmoid "
    "sign sin softplus sqrt square tanh"
)
_UNARY = {
    **{name: getattr(tf.math, name) for name in _SAME_NAMES.split()},
    "gelu": tf.nn.gelu,
    "relu": tf.nn.relu,
    "silu": tf.nn.silu,
    "stop_gradient": tf.stop_gradient,
}
_SAME_NAMES = (
    "add divide equal greater greater_equal less less_equal maximum minimum multiply not_equal "
    "squared_difference subtract"
)
_BINARY = {
    **{name: getattr(tf.math, name) for name in _SAME_NAMES.split()},
    "floor_divide": tf.math.floordiv,
    "floor_mod": tf.math.floormod,
    "power": tf.math.pow,
}
_LOGICAL = {name: getattr(tf.math, name) for name in ("logical_and", "logical_or", "logical_xor")}


def _special(array: np.ndarray) -> np.ndarray:
    array.flat[:3] = [np.inf, -np.inf, np.nan]
    return array


def _by_name(function):
    """Applies a function of tensors of x y z and of z x."""
    return lambda a, b: function(a, tf.transpose(b)[:, None, :])


CASES = [
    Case(
        name,
        (
            (
                _special(numbers(X))
                if name.startswith("is_")
                else numbers(X, low=0.5 if name in _POSITIVE else -2.0),
                X,
            ),
        ),
        lambda _, x, name=name: getattr(ops, name)(x),
        function,
        ("x", "y", "z"),
        thin=name != "exp",
    )
    for name, function in _UNARY.items()
]
CASES += [
    Case(
        name,
        ((numbers(X, 1, 0.5), X), (numbers("z:2;x:4", 2, 0.5), "z:2;x:4")),
        lambda _, a, b, name=name: getattr(ops, name)(a, b),
        _by_name(function),
        ("x", "y", "z"),
        thin=name not in ("multiply", "maximum"),
    )
    for name, function in _BINARY.items()
]
CASES += [
    Case(
        name,
        ((booleans(X, 1), X), (booleans("z:2;x:4", 2), "z:2;x:4")),
        lambda _, a, b, name=name: getattr(ops, name)(a, b),
        _by_name(function),
        ("x", "y", "z"),
        thin=True,
    )
    for name, function in _LOGICAL.items()
]
CASES += [
    Case(
        "logical_not",
        ((booleans(X), X),),
        lambda _, x: ops.logical_not(x),
        tf.logical_not,
        ("x", "y", "z"),
        thin=True,
    ),
    Case(
        "add",
        ((numbers("x:4", 1), "x:4"), (numbers("y:8", 2), "y:8")),
        lambda _, a, b: 1.5 - (a + b) * 2.0,
        lambda a, b: 1.5 - (a[:, None] + b) * 2.0,
        ("x", "y"),
        label="operators",
    ),
    Case(
        "multiply",
        ((numbers(X, 1), X),),
        lambda _, x: x * x,
        lambda x: x * x,
        ("x", "y", "z"),
        label="same operand twice",
        thin=True,
    ),
    Case(
        "divide",
        ((numbers("x:8", 1), "x:8"), (np.zeros(8, np.float32), "x:8")),
        lambda _, a, b: ops.divide(a, b),
        tf.math.divide,
        ("x",),
        label="by zero",
    ),
    Case(
        "where",
        ((booleans("x:4;y:8"), "x:4;y:8"), (numbers("y:8", 1), "y:8"), (numbers("z:2", 2), "z:2")),
        lambda _, c, a, b: ops.where(c, a, b),
        lambda c, a, b: tf.where(c[..., None], a[:, None], b),
        ("x", "y", "z"),
    ),
    Case(
        "where",
        ((booleans("x:4;y:8"), "x:4;y:8"), (numbers("y:8", 1), "y:8")),
        lambda _, c, a: ops.where(c, a, 7.0),
        lambda c, a: tf.where(c, a, 7.0),
        ("x", "y"),
        label="a number",
        thin=True,
    ),
    Case(
        "cast",
        ((numbers(X), X),),
        lambda _, x: ops.cast(x, tf.bfloat16),
        lambda x: tf.cast(x, tf.bfloat16),
        ("x", "y", "z"),
        thin=True,
    ),
    Case(
        "cast",
        ((integers(X, -4, 4), X),),
        lambda _, x: ops.cast(x, tf.bool),
        lambda x: tf.cast(x, tf.bool),
        ("x", "y", "z"),
        label="to booleans",
        thin=True,
    ),
    Case(
        "broadcast_to",
        ((numbers("z:2;x:4"), "z:2;x:4"),),
        lambda _, x: ops.broadcast_to(x, Shape.from_text(X)),
        lambda x: tf.broadcast_to(tf.transpose(x)[:, None], [4, 8, 2]),
        ("x", "y", "z"),
        together=(X,),
    ),
]
