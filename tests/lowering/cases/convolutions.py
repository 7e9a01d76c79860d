"""Cases of convolutions."""

import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import Shape
from tests.lowering.cases.case import Case


def _case(op, x, filters, result, reference, label="", thin=False, **call):
    """The dims of `x` that windows slide over are r, s, t; the windows' own f, g, h."""
    names = Shape.from_text(filters).names
    window = {a: b for a, b in zip("rst", "fgh", strict=True) if b in names}
    channels = ";".join(part for part in filters.split(";") if part[0] in "io")
    outs = ";".join(part for part in filters.split(";") if part[0] == "o")
    return Case(
        op,
        [x, filters],
        lambda _, a, b: getattr(ops, op)(a, b, window, **call),
        reference,
        " ".join(Shape.from_text(result).names),
        together=(f"{x};{outs}" if outs else x, filters, channels, result),
        thin=thin,
        rtol=1e-4,
        label=label,
    )


CASES = [
    _case(
        "conv1d",
        "b:2;r:16;i:4",
        "f:3;i:4;o:4",
        "b:2;r:16;o:4",
        lambda x, f: tf.nn.conv1d(x, f, 1, "SAME"),
        padding="SAME",
        label="same",
    ),
    _case(
        "conv1d",
        "r:17;b:2;i:2",
        "f:2;i:2;o:2",
        "r:16;b:2;o:2",
        lambda x, f: tf.transpose(
            tf.nn.conv1d(tf.transpose(x, [1, 0, 2]), f, 1, "VALID"), [1, 0, 2]
        ),
        padding="VALID",
        label="valid, of an odd size",
        thin=True,
    ),
    _case(
        "conv1d",
        "b:2;r:16;i:2",
        "f:9;i:2;o:2",
        "b:2;r:8;o:2",
        lambda x, f: tf.nn.conv1d(x, f, 1, "VALID"),
        padding="VALID",
        label="valid, a window wider than slices",
    ),
    _case(
        "conv1d",
        "b:2;r:16;i:2",
        "f:4;i:2;o:2",
        "b:2;r:8;o:2",
        lambda x, f: tf.nn.conv1d(x, f, 2, "SAME"),
        padding="SAME",
        strides=2,
        label="stride 2",
        thin=True,
    ),
    _case(
        "conv1d",
        "b:2;r:16;i:2",
        "f:3;i:2;o:2",
        "b:2;r:4;o:2",
        lambda x, f: tf.nn.conv1d(x, f, 3, "VALID", dilations=3),
        padding="VALID",
        strides=3,
        dilations=3,
        label="stride 3 and dilation 3",
        thin=True,
    ),
    _case(
        "conv2d",
        "b:2;r:8;s:4;i:2",
        "f:3;g:3;i:2;o:2",
        "b:2;r:8;s:4;o:2",
        lambda x, f: tf.nn.conv2d(x, f, 1, "SAME"),
        padding="SAME",
    ),
    _case(
        "conv2d",
        "i:2;r:8;s:8;j:2",
        "g:3;f:3;i:2;j:2;o:2",
        "r:4;s:8;o:2",
        lambda x, f: tf.nn.conv2d(
            tf.reshape(tf.transpose(x, [1, 2, 0, 3]), [1, 8, 8, 4]),
            tf.reshape(tf.transpose(f, [1, 0, 2, 3, 4]), [3, 3, 4, 2]),
            [2, 1],
            "SAME",
            dilations=[1, 2],
        )[0],
        padding="SAME",
        strides={"r": 2, "s": 1},
        dilations={"r": 1, "s": 2},
        label="several channels, strides and dilations",
        thin=True,
    ),
    _case(
        "conv3d",
        "r:4;s:4;t:4;i:2",
        "f:3;g:3;h:1;i:2;o:2",
        "r:4;s:4;t:4;o:2",
        lambda x, f: tf.nn.conv3d(x[None], f, [1] * 5, "SAME")[0],
        padding="SAME",
        thin=True,
    ),
]
