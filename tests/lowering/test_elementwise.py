"""The order of the dims of what is computed element by element."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh

LOWERING = PlacementLowering(
    Mesh.from_text("data:2"), LayoutRules.from_text("batch:data"), ["CPU:0", "CPU:1"]
)
X = np.arange(12, dtype=np.float32).reshape(4, 3)
BIAS = np.array([1.0, 2.0, 3.0], np.float32)
MASK = np.array([True, False, True])


def tensor(array, shape):
    return ops.import_tensor(LOWERING, array, shape)


@pytest.mark.parametrize(
    ("got", "want"),
    [
        (lambda x, b, m: b + x, BIAS + X),
        (lambda x, b, m: x + b, X + BIAS),
        (lambda x, b, m: ops.maximum(b, x), np.maximum(BIAS, X)),
        (lambda x, b, m: b < x, BIAS < X),
        (lambda x, b, m: ops.where(m, x, 0.0), np.where(MASK, X, 0)),
        (lambda x, b, m: ops.where(m, 0.0, x), np.where(MASK, 0, X)),
        (lambda x, b, m: ops.where(m, b, x), np.where(MASK, BIAS, X)),
        (lambda x, b, m: ops.where(x > 5, b, 0.0), np.where(X > 5, BIAS, 0)),
    ],
)
def test_results_have_the_order_of_the_operand_that_has_all_dims(got, want):
    """The first operand's dims came first, so exports were the transposes of TensorFlow's."""
    result = got(tensor(X, "batch:4;io:3"), tensor(BIAS, "io:3"), tensor(MASK, "io:3"))
    assert str(result.shape) == "batch:4;io:3"
    np.testing.assert_array_equal(result.numpy(), want)


def test_order_of_dims_is_that_of_the_first_operand():
    x, turned = tensor(X, "batch:4;io:3"), tensor(X.T, "io:3;batch:4")
    assert (x + turned).shape.names == ("batch", "io")
    assert (turned + x).shape.names == ("io", "batch")
    assert ops.where(turned > 5, x, 0.0).shape.names == ("batch", "io")
    np.testing.assert_array_equal(ops.where(turned > 5, x, 0.0).numpy(), np.where(X > 5, X, 0))


def test_if_no_operand_has_all_dims_they_come_from_left_to_right():
    b, m = tensor(BIAS, "io:3"), tensor(np.ones(4, np.bool_), "batch:4")
    assert (b * ops.cast(m, tf.float32)).shape.names == ("io", "batch")
    assert ops.where(m, b, 0.0).shape.names == ("io", "batch")
