"""Complex numbers, narrow integers, half precision, NaN and -inf do not depend on the layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.variable import Constant, Variable
from pipemesh.mesh import LayoutRules, Mesh

RULES = LayoutRules.from_text("v:x")
LOWERINGS = [
    PlacementLowering(Mesh.from_text(f"x:{n}"), RULES, [f"CPU:{i}" for i in range(n)])
    for n in (1, 2, 3)
]
NAN, INF = float("nan"), float("inf")


def given(lowering, array, dim="v"):
    return ops.import_tensor(lowering, array, f"{dim}:{len(array)}")


@pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda low: str(low.mesh))
@pytest.mark.parametrize(
    "use",
    [
        lambda low, x: ops.import_tensor(low, np.ones(12, np.complex64), "v:12"),
        lambda low, x: low.import_tensor(tf.ones([12], tf.complex128), x.layout),
        lambda low, x: ops.cast(x, tf.complex64),
        lambda low, x: ops.one_hot(given(low, [1], "b"), "w:6", dtype=tf.complex64),
        lambda low, x: low.map(lambda part: tf.cast(part, tf.complex64), x.slices),
        lambda low, x: Variable.create(
            "v", x.layout, low.devices, Constant(0.0), tf.complex64
        ),
    ],
)  # fmt: skip
def test_complex_tensors_are_refused(lowering, use):
    """Their gradient was 12,168 on two devices, 113,568 on one, and None in functions."""
    with pytest.raises(ShapeError, match=r"complex.*real numbers or booleans"):
        use(lowering, given(lowering, np.ones(12, np.float32)))


def test_complex_tensors_are_refused_by_cores():
    def program(lowering, x):
        return ops.export_tensor(ops.import_tensor(lowering, x, "v:4"))

    with pytest.raises(ShapeError, match="real numbers"):
        Cores(Mesh.from_text("x:2"), ["CPU:0", "CPU:1"]).function(
            program, RULES, tf.TensorSpec([4], tf.complex64)
        )


@pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda low: str(low.mesh))
def test_narrow_indices_count_along_long_dims(lowering):
    """An 8-bit index met the number 300 as 44, and found a second row."""
    rows = np.arange(600.0)
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.uint32, np.uint64, np.int64):
        at = given(lowering, np.array([0, 5, 100], dtype), "b")
        np.testing.assert_array_equal(ops.one_hot(at, "v:600").numpy(), np.eye(600)[[0, 5, 100]])
        np.testing.assert_array_equal(
            ops.gather(given(lowering, rows), at, "v").numpy(), [0, 5, 100]
        )  # fmt: skip
        odd = ops.gather(given(lowering, rows % 2 == 1), at, "v")
        np.testing.assert_array_equal(odd.numpy(), [False, True, False])


@pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda low: str(low.mesh))
def test_float16_softmax_of_a_long_dim_is_not_zero(lowering):
    x = given(lowering, np.zeros(72000, np.float16))
    assert ops.softmax(x, "v").dtype == tf.float16
    np.testing.assert_allclose(ops.softmax(x, "v").numpy(), np.float16(1 / 72000))
    np.testing.assert_allclose(float(ops.reduce_logsumexp(x)), np.log(72000), rtol=1e-3)
    np.testing.assert_allclose(ops.log_softmax(x, "v").numpy(), -np.log(72000), rtol=1e-3)


@pytest.mark.parametrize("lowering", LOWERINGS, ids=lambda low: str(low.mesh))
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
