"""Cases of convolutions."""

import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import Shape
from tests.lowering.cases.case import Case, numbers


def _case(op, x, filters, result, reference, label="", thin=False, dtype="f4", **call):
    """The dims of `x` that windows slide over are r, s, t; the windows' own f, g, h."""
    names = Shape.from_text(filters).names
    window = {a: b for a, b in zip("rst", "fgh", strict=True) if b in names}
    channels = ";".join(part for part in filters.split(";") if part[0] in "io")
    outs = ";".join(part for part in filters.split(";") if part[0] == "o")
    return Case(
        op,
        [(numbers(shape, i).astype(dtype), shape) for i, shape in enumerate((x, filters))],
        lambda _, a, b: getattr(ops, op)(a, b, window, **call),
        reference,
        " ".join(Shape.from_text(result).names),
        together=(f"{x};{outs}" if outs else x, filters, channels, result),
        thin=thin,
        rtol=1e-4,
        label=label,
    )


def _swapped(filters):
    """Filters of a transposed convolution in TensorFlow's order of channels."""
    return tf.linalg.matrix_transpose(filters)


def _spread(filters, dim, times=2):
    """Filters with zeros between their rows: on many CPUs TensorFlow has no gradient of dilated
    ones.
    """
    first, *others = tf.split(filters, filters.shape[dim], dim)
    gap = [tf.zeros_like(first)] * (times - 1)
    return tf.concat([first, *(part for row in others for part in (*gap, row))], dim)


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
        lambda x, f: tf.nn.conv1d(x, _spread(f, 0, 3), 3, "VALID"),
        padding="VALID",
        strides=3,
        dilations=3,
        label="stride 3 and dilation 3",
        thin=True,
    ),
    _case(
        "conv1d",
        "b:2;r:16;i:2",
        "f:2;i:2;o:2",
        "b:2;r:16;o:2",
        lambda x, f: tf.nn.conv1d(x, _spread(f, 0), 1, "SAME"),
        padding="SAME",
        dilations=2,
        dtype="f8",
        label="dilations of float64",
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
            _spread(tf.reshape(tf.transpose(f, [1, 0, 2, 3, 4]), [3, 3, 4, 2]), 1),
            [2, 1],
            "SAME",
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
    _case(
        "conv3d",
        "r:6;s:4;t:6;i:2",
        "f:2;g:3;h:2;i:2;o:2",
        "r:4;s:2;t:4;o:2",
        # The gradient of a dilated kernel is that of one with zeros in it.
        lambda x, f: tf.nn.conv3d(x[None], _spread(_spread(f, 0), 2), [1] * 5, "VALID")[0],
        padding="VALID",
        dilations={"r": 2, "s": 1, "t": 2},
        label="dilations",
        thin=True,
    ),
    _case(
        "conv_transpose",
        "b:2;r:8;i:2",
        "f:3;i:2;o:2",
        "b:2;r:16;o:2",
        lambda x, f: tf.nn.conv1d_transpose(x, _swapped(f), [2, 16, 2], 2, "SAME"),
        padding="SAME",
        strides=2,
        label="of one dim",
    ),
    _case(
        "conv_transpose",
        "b:2;r:8;i:2",
        "f:7;i:2;o:2",
        "b:2;r:28;o:2",
        lambda x, f: tf.nn.conv1d_transpose(x, _swapped(f), [2, 28, 2], 3, "VALID"),
        padding="VALID",
        strides=3,
        label="valid, slices that end within a step",
    ),
    _case(
        "conv_transpose",
        "b:2;r:8;s:4;i:2",
        "f:2;g:9;i:2;o:2",
        "b:2;r:24;s:4;o:2",
        lambda x, f: tf.nn.conv2d_transpose(x, _swapped(f), [2, 24, 4, 2], [3, 1], "SAME"),
        padding="SAME",
        strides={"r": 3, "s": 1},
        label="of two dims, a window wider than slices",
        thin=True,
    ),
    _case(
        "conv_transpose",
        "b:2;r:8;i:2",
        "f:2;i:2;o:2",
        "b:2;r:10;o:2",
        lambda x, f: tf.nn.conv1d_transpose(
            x, _swapped(tf.stack([f[0], 0 * f[0], f[1]])), [2, 10, 2], 1, "VALID"
        ),
        padding="VALID",
        dilations=2,
        label="dilation 2",
        thin=True,
    ),
    _case(
        "conv_transpose",
        "r:2;s:4;t:2;i:2",
        "f:2;g:3;h:2;i:2;o:2",
        "r:4;s:8;t:4;o:2",
        lambda x, f: tf.nn.conv3d_transpose(x[None], _swapped(f), [1, 4, 8, 4, 2], 2, "SAME")[0],
        padding="SAME",
        strides=2,
        label="of three dims",
        thin=True,
    ),
    _case(
        "conv_transpose",
        "b:2;r:0;i:2",
        "f:3;i:2;o:2",
        "b:2;r:0;o:2",
        lambda x, f: tf.zeros([2, 0, 2]) + tf.reduce_sum(x) + tf.reduce_sum(f),
        padding="SAME",
        label="of no rows",
        thin=True,
    ),
    _case(
        "conv1d",
        "b:2;r:0;i:2",
        "f:1;i:2;o:2",
        "b:2;r:0;o:2",
        lambda x, f: tf.zeros([2, 0, 2]) + tf.reduce_sum(x) + tf.reduce_sum(f),
        padding="SAME",
        label="of no rows",
        thin=True,
    ),
]
