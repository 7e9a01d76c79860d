"""Cases of operations that work element by element."""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import Shape
from tests.lowering.cases.case import Case, booleans, integers, numbers

X = "x:4;y:8;z:2"

_POSITIVE = {"log", "log1p", "sqrt", "rsqrt", "reciprocal"}
_UNARY = {
    "abs": tf.abs,
    "ceil": tf.math.ceil,
    "cos": tf.cos,
    "erf": tf.math.erf,
    "exp": tf.exp,
    "floor": tf.math.floor,
    "gelu": tf.nn.gelu,
    "is_finite": tf.math.is_finite,
    "is_nan": tf.math.is_nan,
    "log": tf.math.log,
    "log1p": tf.math.log1p,
    "negative": tf.negative,
    "reciprocal": tf.math.reciprocal,
    "relu": tf.nn.relu,
    "round": tf.round,
    "rsqrt": tf.math.rsqrt,
    "sigmoid": tf.sigmoid,
    "sign": tf.sign,
    "silu": tf.nn.silu,
    "sin": tf.sin,
    "softplus": tf.math.softplus,
    "sqrt": tf.sqrt,
    "square": tf.square,
    "stop_gradient": tf.stop_gradient,
    "tanh": tf.tanh,
}
_BINARY = {
    "add": tf.add,
    "divide": tf.math.divide,
    "equal": tf.equal,
    "floor_divide": tf.math.floordiv,
    "floor_mod": tf.math.floormod,
    "greater": tf.greater,
    "greater_equal": tf.greater_equal,
    "less": tf.less,
    "less_equal": tf.less_equal,
    "maximum": tf.maximum,
    "minimum": tf.minimum,
    "multiply": tf.multiply,
    "not_equal": tf.not_equal,
    "power": tf.pow,
    "squared_difference": tf.math.squared_difference,
    "subtract": tf.subtract,
}
_LOGICAL = {
    "logical_and": tf.logical_and,
    "logical_or": tf.logical_or,
    "logical_xor": tf.math.logical_xor,
}


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
