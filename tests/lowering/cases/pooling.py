"""Cases of pooling and upsampling."""

import tensorflow as tf

from pipemesh.lowering import ops
from tests.lowering.cases.case import Case, integers

X = "b:2;r:16;c:2"
IMAGES = "b:2;r:8;s:4;c:2"
VOLUMES = "r:4;s:8;t:4;c:2"


def _case(op, x, result, window, reference, *, array=None, strides=None, label="", thin=False):
    padding = "VALID" if "valid" in label else "SAME"
    return Case(
        op,
        [x if array is None else (array, x)],
        lambda _, a: getattr(ops, op)(a, window, padding=padding, strides=strides),
        reference,
        " ".join(part.split(":")[0] for part in result.split(";")),
        together=(x, result),
        label=label,
        thin=thin,
    )


def _upsampled(x, result, factors, label="", thin=False):
    def reference(t):
        for at, part in enumerate(x.split(";")):
            t = tf.repeat(t, factors.get(part.split(":")[0], 1), at)
        return t

    out = " ".join(part.split(":")[0] for part in result.split(";"))
    return Case(
        "upsample",
        [x],
        lambda _, a: ops.upsample(a, factors),
        reference,
        out,
        together=(x, result),
        label=label,
        thin=thin,
    )


CASES = [
    _case("max_pool", X, "b:2;r:8;c:2", {"r": 2}, lambda x: tf.nn.max_pool1d(x, 2, 2, "SAME")),
    _case(
        "max_pool",
        X,
        X,
        {"r": 3},
        lambda x: tf.nn.max_pool1d(x, 3, 1, "SAME"),
        # Below zero, so that a row outside which counted would be the greatest.
        array=integers(X, -9, -1).astype("float32"),
        strides=1,
        label="overlapping windows",
    ),
    _case(
        "max_pool",
        IMAGES,
        IMAGES,
        {"r": 3, "s": 2},
        lambda x: tf.nn.max_pool2d(x, [3, 2], 1, "SAME"),
        array=integers(IMAGES, 0, 3).astype("float32"),
        strides=1,
        label="gradient of equal elements",
    ),
    _case(
        "max_pool",
        VOLUMES,
        "r:2;s:4;t:2;c:2",
        {"r": 2, "s": 2, "t": 2},
        lambda x: tf.nn.max_pool3d(x[None], 2, 2, "VALID")[0],
        label="valid, of three dims",
        thin=True,
    ),
    _case(
        "avg_pool",
        X,
        X,
        {"r": 4},
        lambda x: tf.nn.avg_pool1d(x, 4, 1, "SAME"),
        strides=1,
        label="only real rows count",
    ),
    _case(
        "avg_pool",
        X,
        "b:2;r:8;c:2",
        {"r": 9},
        lambda x: tf.nn.avg_pool1d(x, 9, 1, "VALID"),
        strides=1,
        label="valid, a window wider than slices",
    ),
    _case(
        "avg_pool",
        IMAGES,
        "b:2;r:4;s:4;c:2",
        {"s": 3, "r": 3},
        lambda x: tf.nn.avg_pool2d(x, 3, [2, 1], "SAME"),
        strides={"r": 2, "s": 1},
        label="of two dims",
        thin=True,
    ),
    _case(
        "avg_pool",
        VOLUMES,
        "r:2;s:4;t:2;c:2",
        {"r": 3, "s": 3, "t": 3},
        lambda x: tf.nn.avg_pool3d(x[None], 3, 2, "SAME")[0],
        strides=2,
        label="of three dims",
        thin=True,
    ),
    _upsampled(X, "b:2;r:48;c:2", {"r": 3}),
    _upsampled(
        VOLUMES,
        "r:8;s:16;t:4;c:2",
        {"r": 2, "s": 2},
        label="of two dims",
        thin=True,
    ),
]
