"""Cases of reductions and softmax."""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from tests.lowering.cases.case import Case, booleans, integers, numbers

X = "x:4;y:8;z:2"

_FLOAT = {
    "reduce_sum": tf.reduce_sum,
    "reduce_mean": tf.reduce_mean,
    "reduce_max": tf.reduce_max,
    "reduce_min": tf.reduce_min,
    "reduce_logsumexp": tf.reduce_logsumexp,
}
# Many equal elements, which share the gradient of max and min.
TIES = integers(X, 0, 3).astype(np.float32)


def _case(name, function, array, shape, dims, out, **more):
    names = [part.split(":")[0] for part in shape.split(";")]
    at = None if dims is None else [names.index(dim) for dim in dims]
    return Case(
        name,
        [(array, shape)],
        lambda _, x: getattr(ops, name)(x, dims),
        lambda x: function(x, at),
        out,
        **more,
    )


CASES = [_case(name, function, numbers(X), X, ("z", "x"), "y") for name, function in _FLOAT.items()]
CASES += [
    _case(name, function, TIES, X, None, "", label="ties, all dims", thin=True)
    for name, function in _FLOAT.items()
]
CASES += [
    _case(name, function, numbers("x:4;e:0;y:8"), "x:4;e:0;y:8", dims, out, label=label, thin=True)
    for name, function in _FLOAT.items()
    for dims, out, label in (
        (("e",), "x y", "over nothing"),
        (("x",), "e y", "of size zero"),
    )
]
CASES += [
    _case(
        "reduce_max",
        tf.reduce_max,
        integers(X, -9, 9),
        X,
        ("y",),
        "x z",
        label="integers",
        thin=True,
    ),
    _case("reduce_all", tf.reduce_all, booleans(X, share=0.9), X, ("x", "z"), "y"),
    _case("reduce_any", tf.reduce_any, booleans(X, share=0.1), X, ("x", "z"), "y"),
    _case(
        "reduce_logsumexp",
        tf.reduce_logsumexp,
        np.array([[-np.inf] * 8, [np.inf] + [0] * 7, [1e4] * 8, [-1e4] * 8], np.float32),
        "x:4;y:8",
        ("y",),
        "x",
        label="infinite and great",
        differentiable=(),
    ),
    _case("softmax", lambda x, at: tf.nn.softmax(x, at[0]), numbers(X), X, ("y",), "x y z"),
    _case(
        "softmax",
        lambda x, _: tf.reshape(tf.nn.softmax(tf.reshape(x, [4, 16])), [4, 8, 2]),
        numbers(X),
        X,
        ("z", "y"),
        "x y z",
        label="two dims",
        thin=True,
    ),
    _case(
        "log_softmax",
        lambda x, at: tf.nn.log_softmax(x, at[0]),
        numbers(X, high=50.0),
        X,
        ("y",),
        "x y z",
    ),
]
