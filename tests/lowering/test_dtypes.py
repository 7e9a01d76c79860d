"""Narrow integers, half precision, NaN and -inf do not depend on the layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.devices import device_name

pytestmark = pytest.mark.gpu

RULES = LayoutRules.from_text("v:x")
LOWERINGS = [
    PlacementLowering(Mesh.from_text(f"x:{n}"), RULES, [device_name(i) for i in range(n)])
    for n in (1, 2, 3)
]
under_each = pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda low: str(low.mesh))
NAN, INF = float("nan"), float("inf")


def given(lowering, array, dim="v"):
    return ops.import_tensor(lowering, array, f"{dim}:{len(array)}")


@under_each
def test_narrow_indices_count_along_long_dims(lowering):
    """An 8-bit index met the number 300 as 44, and found a second row."""
    rows = np.arange(600.0)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.uint64, np.int64):
        at = given(lowering, np.array([0, 5, 100], dtype), "b")
        np.testing.assert_array_equal(ops.one_hot(at, "v:600").numpy(), np.eye(600)[[0, 5, 100]])
        found = ops.gather(given(lowering, rows), at, "v")
        np.testing.assert_array_equal(found.numpy(), [0, 5, 100])
        odd = ops.gather(given(lowering, rows % 2 == 1), at, "v")
        np.testing.assert_array_equal(odd.numpy(), [False, True, False])


@under_each
def test_float16_softmax_of_a_long_dim_is_not_zero(lowering):
    x = given(lowering, np.zeros(72000, np.float16))
    assert ops.softmax(x, "v").dtype == tf.float16
    np.testing.assert_allclose(ops.softmax(x, "v").numpy(), np.float16(1 / 72000))
    np.testing.assert_allclose(float(ops.reduce_logsumexp(x)), np.log(72000), rtol=1e-3)
    np.testing.assert_allclose(ops.log_softmax(x, "v").numpy(), -np.log(72000), rtol=1e-3)


@under_each
@pytest.mark.parametrize(
    "values",
    [
        [-INF] * 6 + [NAN] * 6,
        [NAN] * 3 + [-INF] * 9,
        [NAN, 1.0, NAN, 2.0] * 3,
        [-INF, np.finfo(np.float32).min] * 6,
        [NAN] * 12,
        [2.0, NAN, 3.0, NAN, 5.0, NAN, 1.0, 2.0, 5.0, 4.0, NAN, 1.0],
    ],
    ids=str,
)
def test_order_with_nan_does_not_depend_on_the_layout(lowering, values):
    array = np.array(values, np.float32)
    x = given(lowering, array)
    assert ops.argmax(x, "v").numpy() == tf.argmax(array).numpy()
    np.testing.assert_array_equal(ops.reduce_max(x).numpy(), tf.reduce_max(array))
    np.testing.assert_array_equal(ops.reduce_min(x).numpy(), tf.reduce_min(array))
    # NaN counts as -inf, and of equal elements the lower index comes first.
    order = np.argsort(np.where(np.isnan(array), INF, -array), kind="stable")
    for k in (1, 3, 12):
        best, where = ops.top_k(x, "v", f"k:{k}")
        np.testing.assert_array_equal(where.numpy(), order[:k])
        np.testing.assert_array_equal(best.numpy(), array[order[:k]])
