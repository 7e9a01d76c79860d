"""Cases of operations along one dim: more, fewer or other rows, their order, their neighbours."""

import numpy as np
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import Dim
from tests.lowering.cases.case import Case, booleans, integers

X = "x:4;y:8;z:2"
TIES = integers(X, 0, 3).astype(np.float32)
NOT_NUMBERS = np.array(
    [
        [np.nan, np.nan, np.nan, -np.inf],
        [np.nan, 1, -np.inf, -np.inf],
        [np.nan, 2, np.nan, np.inf],
        [np.nan, np.nan, -5, np.inf],
    ],
    np.float32,
)


def _case(op, call, reference, *, array=None, shape=X, out="x y z", **more):
    inputs = [shape if array is None else (array, shape)]
    return Case(op, inputs, lambda _, x: call(x), reference, out, **more)


def _swap(x):
    """The last dim and that before it."""
    return tf.transpose(x, [0, 2, 1])


def _halos(x, halo, wrap):
    """Cases of a tensor of blocks and rows."""
    before, behind = tf.roll(x[:, -halo:], 1, 0), tf.roll(x[:, :halo], -1, 0)
    if not wrap:
        before = tf.pad(before[1:], [[1, 0], [0, 0], [0, 0]])
        behind = tf.pad(behind[:-1], [[0, 1], [0, 0], [0, 0]])
    return tf.concat([before, x, behind], 1)


def _moved(x, offset):
    """Without wrap, in the second of three dims."""
    size = x.shape[1]
    padded = tf.pad(x, [[0, 0], [size, size], [0, 0]])
    return padded[:, size - offset : 2 * size - offset]


def _several(op, inputs, call, reference, out="x y z", **more):
    return Case(op, inputs, lambda _, *x: call(*x), reference, out, **more)


ORDER = [
    _case(
        "top_k",
        lambda x: ops.top_k(x, "y", Dim("k", 4))[0],
        lambda x: _swap(tf.math.top_k(_swap(x), 4).values),
        out="x k z",
        together=(X, "x:4;k:4;z:2"),
        label="values",
    ),
    _case(
        "top_k",
        lambda x: ops.top_k(x, "y", Dim("k", 6))[1],
        lambda x: _swap(tf.math.top_k(_swap(x), 6).indices),
        array=TIES,
        out="x k z",
        together=(X, "x:4;k:6;z:2"),
        label="indices of equal elements",
        thin=True,
    ),
    _case(
        "argmax",
        lambda x: ops.argmax(x, "y"),
        lambda x: tf.argmax(x, 1, tf.int32),
        array=TIES,
        out="x z",
    ),
    _case(
        "argmax",
        lambda x: ops.argmax(x, "y"),
        lambda x: tf.argmax(x, 1, tf.int32),
        array=booleans(X, share=0.3),
        out="x z",
        label="booleans",
        thin=True,
    ),
    _case(
        "argmax",
        lambda x: ops.argmax(x, "x"),
        lambda x: tf.argmax(x, 0, tf.int32),
        array=NOT_NUMBERS,
        shape="x:4;y:4",
        out="y",
        label="NaN and infinite",
        thin=True,
    ),
    _case("cumsum", lambda x: ops.cumsum(x, "y"), lambda x: tf.cumsum(x, 1)),
    _case(
        "cumsum",
        lambda x: ops.cumsum(x, "y", exclusive=True, reverse=True),
        lambda x: tf.cumsum(x, 1, exclusive=True, reverse=True),
        label="exclusive and reverse",
        thin=True,
    ),
    _case(
        "cumsum",
        lambda x: ops.cumsum(x, "y", exclusive=True),
        lambda x: tf.cumsum(x, 1, exclusive=True),
        array=integers(X, -9, 9),
        label="exclusive integers",
        thin=True,
    ),
]

RESIZE = [
    _case(
        "slice",
        lambda x: ops.slice(x, "y", 3, 4),
        lambda x: x[:, 3:7],
        together=(X, "x:4;y:4;z:2"),
    ),
    _case(
        "slice",
        lambda x: ops.slice(x, "x", 5, 8),
        lambda x: x[:, 5:13],
        array=booleans("y:2;x:16"),
        shape="y:2;x:16",
        out="y x",
        together=("y:2;x:16", "y:2;x:8"),
        label="of booleans",
        thin=True,
    ),
    _case(
        "pad",
        lambda x: ops.pad(x, "y", 3, 5),
        lambda x: tf.pad(x, [[0, 0], [3, 5], [0, 0]]),
        together=(X, "x:4;y:16;z:2"),
    ),
    _case(
        "pad",
        lambda x: ops.pad(x, "y", 1, 7, -np.inf),
        lambda x: tf.pad(x, [[0, 0], [1, 7], [0, 0]], constant_values=-np.inf),
        together=(X, "x:4;y:16;z:2"),
        label="with a value",
        thin=True,
    ),
    _several(
        "concat",
        ["x:4;y:8;z:2", "z:2;y:4;x:4", "x:4;y:4;z:2"],
        lambda a, b, c: ops.concat([a, b, c], "y"),
        lambda a, b, c: tf.concat([a, tf.transpose(b), c], 1),
        together=("x:4;y:8;z:2", "x:4;y:4;z:2", "x:4;y:16;z:2"),
    ),
    _case(
        "concat",
        lambda x: ops.concat([x, x], "y"),
        lambda x: tf.concat([x, x], 1),
        array=booleans(X),
        together=(X, "x:4;y:16;z:2"),
        label="booleans",
        thin=True,
    ),
    _case(
        "split",
        lambda x: ops.subtract(*ops.split(x, "y", 2)),
        lambda x: tf.subtract(*tf.split(x, 2, 1)),
        together=(X, "x:4;y:4;z:2"),
    ),
    _case(
        "split",
        lambda x: ops.concat(ops.split(x, "y", [2, 4, 2])[::-1], "y"),
        lambda x: tf.concat(tf.split(x, [2, 4, 2], 1)[::-1], 1),
        together=(X, "x:4;y:2;z:2", "x:4;y:4;z:2"),
        label="unequal pieces",
        thin=True,
    ),
    _several(
        "stack",
        ["x:4;y:8", "y:8;x:4"],
        lambda a, b: ops.stack([a, b, a, b], "w", 1),
        lambda a, b: tf.stack([a, tf.transpose(b), a, tf.transpose(b)], 1),
        "x w y",
        together=("x:4;w:4;y:8",),
    ),
    _case(
        "unstack",
        lambda x: ops.unstack(x, "x")[1] - ops.unstack(x, "x")[3] * 2.0,
        lambda x: x[1] - x[3] * 2.0,
        out="y z",
    ),
]

NEIGHBOURS = [
    _case(
        "shift",
        lambda x: ops.shift(x, "y", 3, wrap=False),
        lambda x: _moved(x, 3),
    ),
    _case(
        "shift",
        lambda x: ops.shift(x, "y", -11, wrap=True),
        lambda x: tf.roll(x, -11, 1),
        label="wrap",
    ),
    _case(
        "shift",
        lambda x: ops.shift(x, "y", -9, wrap=False),
        lambda x: _moved(x, -8),
        label="beyond the end",
        thin=True,
    ),
    _case(
        "halo_exchange",
        lambda x: ops.halo_exchange(x, "x", "y", 1),
        lambda x: _halos(x, 1, False),
        shape="x:8;y:4;z:2",
        together=("x:8;y:4;z:2", "x:8;y:6;z:2"),
    ),
    _case(
        "halo_exchange",
        lambda x: ops.halo_exchange(x, "x", "y", 4, wrap=True),
        lambda x: _halos(x, 4, True),
        shape="x:8;y:4;z:2",
        together=("x:8;y:4;z:2", "x:8;y:12;z:2"),
        label="whole blocks, wrap",
        thin=True,
    ),
]

CASES = [*ORDER, *RESIZE, *NEIGHBOURS]
