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


def _case(op, inputs, reference, call=None, out="x y z", **more):
    """A call of the operation with the inputs, or another one."""
    call = call or getattr(ops, op)
    return Case(op, inputs, lambda _, *given: call(*given), reference, out, **more)


CASES = [
    *(
        _case(
            name,
            [
                (_special(numbers(X)), X)
                if name.startswith("is_")
                else (numbers(X, low=0.5 if name in _POSITIVE else -2.0), X)
            ],
            function,
            thin=name != "exp",
        )
        for name, function in _UNARY.items()
    ),
    *(
        _case(
            name,
            [(numbers(X, 1, 0.5), X), (numbers("z:2;x:4", 2, 0.5), "z:2;x:4")],
            _by_name(function),
            thin=name not in ("multiply", "maximum"),
        )
        for name, function in _BINARY.items()
    ),
    *(
        _case(
            name,
            [(booleans(X, 1), X), (booleans("z:2;x:4", 2), "z:2;x:4")],
            _by_name(function),
            thin=True,
        )
        for name, function in _LOGICAL.items()
    ),
    _case("logical_not", [(booleans(X), X)], tf.logical_not, thin=True),
    _case(
        "add",
        ["x:4", "y:8"],
        lambda a, b: 1.5 - (a[:, None] + b) * 2.0,
        lambda a, b: 1.5 - (a + b) * 2.0,
        "x y",
        label="operators",
    ),
    _case("multiply", [X], tf.square, lambda x: x * x, label="same operand twice", thin=True),
    _case(
        "divide",
        ["x:8", (np.zeros(8, np.float32), "x:8")],
        tf.math.divide,
        out="x",
        label="by zero",
    ),
    _case(
        "where",
        [(booleans("x:4;y:8"), "x:4;y:8"), "y:8", "z:2"],
        lambda c, a, b: tf.where(c[..., None], a[:, None], b),
    ),
    _case(
        "where",
        [(booleans("x:4;y:8"), "x:4;y:8"), "y:8"],
        lambda c, a: tf.where(c, a, 7.0),
        lambda c, a: ops.where(c, a, 7.0),
        "x y",
        label="a number",
        thin=True,
    ),
    _case(
        "cast",
        [X],
        lambda x: tf.cast(x, tf.bfloat16),
        lambda x: ops.cast(x, tf.bfloat16),
        thin=True,
    ),
    _case(
        "cast",
        [(integers(X, -4, 4), X)],
        lambda x: tf.cast(x, tf.bool),
        lambda x: ops.cast(x, tf.bool),
        label="to booleans",
        thin=True,
    ),
    _case(
        "broadcast_to",
        ["z:2;x:4"],
        lambda x: tf.broadcast_to(tf.transpose(x)[:, None], [4, 8, 2]),
        lambda x: ops.broadcast_to(x, Shape.from_text(X)),
        together=(X,),
    ),
]
