"""The order of the dims of what is computed element by element."""

import numpy as np
import pytest

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
        (lambda x, b, m, _: b + x, BIAS + X),
        (lambda x, b, m, _: x + b, X + BIAS),
        (lambda x, b, m, _: b < x, BIAS < X),
        (lambda x, b, m, _: ops.where(m, x, 0.0), np.where(MASK, X, 0)),
        (lambda x, b, m, _: ops.where(m, b, x), np.where(MASK, BIAS, X)),
        (lambda x, b, m, _: ops.where(x > 5, b, 0.0), np.where(X > 5, BIAS, 0)),
        # Of several that have all dims the first one, in `where` before the condition.
        (lambda x, b, m, turned: x + turned, X + X),
        (lambda x, b, m, turned: ops.where(turned > 5, x, 0.0), np.where(X > 5, X, 0)),
    ],
)
def test_results_have_the_order_of_the_operand_that_has_all_dims(got, want):
    """The first operand's dims came first, so exports were the transposes of TensorFlow's."""
    x, turned = tensor(X, "batch:4;io:3"), tensor(X.T, "io:3;batch:4")
    result = got(x, tensor(BIAS, "io:3"), tensor(MASK, "io:3"), turned)
    assert str(result.shape) == "batch:4;io:3"
    np.testing.assert_array_equal(result.numpy(), want)


def test_if_no_operand_has_all_dims_they_come_from_left_to_right():
    b, ones = tensor(BIAS, "io:3"), tensor(np.ones(4, np.float32), "batch:4")
    assert (b * ones).shape.names == ("io", "batch")
    assert ops.where(ones > 0, b, 0.0).shape.names == ("io", "batch")
