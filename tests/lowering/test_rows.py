"""Communication of operations on rows."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape

MESH = Mesh.from_text("rows:4")


def make(rules):
    return PlacementLowering(MESH, LayoutRules.from_text(rules), [f"CPU:{i}" for i in range(4)])


def given(lowering, shape):
    return ops.import_tensor(lowering, np.ones(Shape.from_text(shape).sizes, np.float32), shape)


def sent(lowering):
    """Calls and bytes by primitive and pass."""
    return {key[1:]: value for key, value in lowering.costs.rows.items()}


@pytest.mark.parametrize(
    ("call", "shape", "primitive", "calls", "numbers"),
    [
        # A row of two numbers up and one down, although a slice has two blocks of six rows.
        (lambda x, _: ops.halo_exchange(x, "y", "x", 1), "y:8;x:6;io:2", "permute", 2, 2 * 2),
        # A convolution gets only the border rows, of a batch of two.
        (
            lambda x, w: ops.conv1d(x, w, {"y": "window"}, padding="SAME"),
            *("batch:2;y:16;io:3", "permute", 2, 2 * 2 * 3),
        ),
        (lambda x, _: ops.shift(x, "y", 1, wrap=True), "y:16;io:3", "permute", 1, 3),
        (lambda x, _: ops.shift(x, "y", 8, wrap=True), "y:16;io:3", "permute", 1, 4 * 3),
        # One row in one and two steps.
        (lambda x, _: ops.cumsum(x, "y"), "y:16;io:3", "permute", 3, 3 * 3),
        # Two of each slice's four rows go one slice on.
        (lambda x, _: ops.slice(x, "y", 2, 8), "y:16", "permute", 1, 2),
        # Values and indices of each slice's greatest, to three others.
        (lambda x, _: ops.top_k(x, "y", Dim("k", 2)), "y:400", "all_gather", 2, 2 * 3 * 2),
    ],
)
def test_only_rows_that_others_need_are_sent(call, shape, primitive, calls, numbers):
    lowering = make("y:rows")
    call(given(lowering, shape), given(lowering, "window:3;io:3;out:5"))
    assert sent(lowering) == {(primitive, "forward"): (calls, 4 * numbers)}


def test_a_convolution_whose_windows_lie_in_slices_sends_nothing():
    lowering = make("y:rows")
    x, filters = given(lowering, "y:16;io:3"), given(lowering, "window:2;io:3;out:5")
    ops.conv1d(x, filters, {"y": "window"}, padding="SAME", strides=2)
    assert not sent(lowering)


def test_gradient_of_a_halo_is_added_to_its_row():
    lowering = make("blocks:rows")
    x = tf.zeros([4, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        named = ops.import_tensor(lowering, x, "blocks:4;y:3")
        y = ops.export_tensor(ops.halo_exchange(named, "blocks", "y", 1))
    # A first row is the halo of the block before, a last row of the block behind.
    want = [[1, 1, 2], [2, 1, 2], [2, 1, 2], [2, 1, 1]]
    assert tape.gradient(y, x).numpy().tolist() == want
    assert sent(lowering)["permute", "backward"] == (2, 2 * 4)
