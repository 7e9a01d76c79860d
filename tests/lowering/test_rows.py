"""Communication and errors of operations on rows."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import Dim, LayoutRules, Mesh


def make(rules, mesh_text="rows:4"):
    mesh = Mesh.from_text(mesh_text)
    devices = [f"CPU:{i}" for i in range(mesh.num_devices)]
    return PlacementLowering(mesh, LayoutRules.from_text(rules), devices)


def given(lowering, shape):
    sizes = [int(part.split(":")[1]) for part in shape.split(";")]
    numbers = np.arange(np.prod(sizes), dtype=np.float32).reshape(sizes)
    return ops.import_tensor(lowering, numbers, shape)


def sent(lowering):
    """Calls and bytes by primitive and pass."""
    return {key[1:]: value for key, value in lowering.costs.rows.items()}


def test_a_halo_exchange_sends_one_row_to_each_neighbour():
    lowering = make("blocks:rows")
    ops.halo_exchange(given(lowering, "blocks:8;y:6;io:2"), "blocks", "y", 1)
    # A row of two numbers up and one down, although a slice has two blocks of six rows.
    assert sent(lowering) == {("permute", "forward"): (2, 2 * 2 * 4)}


def test_the_gradient_of_a_halo_goes_back_to_its_row_and_is_added():
    lowering = make("blocks:rows")
    x = tf.zeros([4, 3])
    with tf.GradientTape() as tape:
        tape.watch(x)
        named = ops.import_tensor(lowering, x, "blocks:4;y:3")
        y = ops.export_tensor(ops.halo_exchange(named, "blocks", "y", 1))
    assert y.shape == (4, 5)
    got = tape.gradient(y, x).numpy().tolist()
    # A first row is the halo of the block before, a last row of the block behind.
    assert got == [[1, 1, 2], [2, 1, 2], [2, 1, 2], [2, 1, 1]]
    assert sent(lowering)["permute", "backward"] == (2, 2 * 4)


def test_a_convolution_gets_the_border_rows_of_its_neighbours_only():
    lowering = make("y:rows")
    x = given(lowering, "batch:2;y:16;io:3")
    filters = given(lowering, "window:3;io:3;out:5")
    ops.conv1d(x, filters, {"y": "window"}, padding="SAME")
    row = 2 * 3 * 4
    assert sent(lowering) == {("permute", "forward"): (2, 2 * row)}


def test_a_convolution_whose_windows_lie_in_slices_sends_nothing():
    lowering = make("y:rows")
    x, filters = given(lowering, "y:16;io:3"), given(lowering, "window:2;io:3;out:5")
    ops.conv1d(x, filters, {"y": "window"}, padding="SAME", strides=2)
    assert not sent(lowering)


def test_a_shift_sends_the_rows_that_cross_a_border():
    lowering = make("y:rows")
    ops.shift(given(lowering, "y:16;io:3"), "y", 1, wrap=True)
    assert sent(lowering) == {("permute", "forward"): (1, 3 * 4)}
    lowering.costs.clear()
    ops.shift(given(lowering, "y:16;io:3"), "y", 8, wrap=True)
    assert sent(lowering) == {("permute", "forward"): (1, 4 * 3 * 4)}


def test_a_slice_sends_less_than_all_rows():
    lowering = make("y:rows")
    ops.slice(given(lowering, "y:16"), "y", 2, 8)
    # Two rows of each slice's four, at two distances, up and down; all rows would be 48 bytes.
    assert sent(lowering)["permute", "forward"][1] < 4 * 4 * 3


def test_a_cumulative_sum_sends_one_row_in_one_and_two_steps():
    lowering = make("y:rows")
    ops.cumsum(given(lowering, "y:16;io:3"), "y")
    assert sent(lowering) == {("permute", "forward"): (3, 3 * 3 * 4)}


def test_top_k_sends_the_greatest_elements_of_each_slice():
    lowering = make("y:rows")
    ops.top_k(given(lowering, "y:400"), "y", Dim("k", 2))
    # Values and indices, to three others.
    assert sent(lowering) == {("all_gather", "forward"): (2, 2 * 3 * 2 * 4)}


@pytest.mark.parametrize(
    "call",
    [
        lambda x, _: ops.slice(x, "y", 0, 6),
        lambda x, _: ops.pad(x, "y", 1, 1),
        lambda x, _: ops.concat([x, ops.slice(x, "y", 0, 2)], "y"),
        lambda x, _: ops.split(x, "y", [2, 14]),
        lambda x, f: ops.conv1d(x, f, {"y": "window"}, padding="VALID"),
        lambda x, f: ops.conv1d(x, f, {"y": "window"}, padding="SAME", strides=3),
    ],
)
def test_a_result_that_does_not_divide_is_an_error_that_names_the_rule(call):
    lowering = make("y:rows")
    x, filters = given(lowering, "y:16;io:3"), given(lowering, "window:3;io:3;out:5")
    with pytest.raises(LayoutError, match="remove or change the rule 'y:rows'"):
        call(x, filters)


def test_channels_and_rows_split_over_one_axis_are_an_error():
    lowering = make("y:rows;out:rows")
    x, filters = given(lowering, "y:16;io:3"), given(lowering, "window:3;io:3;out:4")
    with pytest.raises(LayoutError, match="'y:rows' or 'out:rows'"):
        ops.conv1d(x, filters, {"y": "window"}, padding="SAME")


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, _: ops.slice(x, "y", 10, 8), "rows 10 to 18 of dim 'y'"),
        (lambda x, _: ops.slice(x, "z", 0, 8), "no dim is called 'z'"),
        (lambda x, _: ops.pad(x, "y", -1, 1), "use `slice`"),
        (lambda x, _: ops.concat([x, ops.cast(x, tf.int32)], "y"), "cannot be joined"),
        (lambda x, _: ops.stack([x, ops.rename(x, {"io": "u"})], "w"), "cannot be joined"),
        (lambda x, _: ops.stack([x], "w", 3), "position 3 is none of 0 to 2"),
        (lambda x, _: ops.stack([x], "y"), "occurs twice"),
        (lambda x, _: ops.split(x, "y", 3), "cannot be cut into 3 equal pieces"),
        (lambda x, _: ops.split(x, "y", [8, 4]), "have to sum up to 16"),
        (lambda x, _: ops.top_k(x, "io", Dim("k", 4)), "has no 4 elements"),
        (lambda x, _: ops.argmax(ops.slice(x, "io", 0, 0), "io"), "has no elements"),
        (lambda x, _: ops.halo_exchange(x, "y", "io", 4), "it has 0 to 3 rows"),
        (lambda x, _: ops.halo_exchange(x, "y", "y", 1), "the dims are two"),
        (lambda x, f: ops.conv1d(x, f, {"y": "window"}, padding="same"), "'SAME' or 'VALID'"),
        (lambda x, f: ops.conv2d(x, f, {"y": "window"}, padding="SAME"), "slides over 2 dims"),
        (lambda x, f: ops.conv1d(x, f, {"y": "io"}, padding="SAME"), "names of their own"),
        (
            lambda x, f: ops.conv1d(x, f, {"y": "window"}, padding="SAME", strides={"z": 1}),
            "one for each of y",
        ),
        (
            lambda x, f: ops.conv1d(x, f, {"y": "window"}, padding="VALID", dilations=8),
            "a window of 17 rows does not fit",
        ),
    ],
)
def test_what_does_not_fit_is_an_error(call, message):
    lowering = make("", "rows:1")
    x, filters = given(lowering, "y:16;io:3"), given(lowering, "window:3;io:3;out:5")
    with pytest.raises(ShapeError, match=message):
        call(x, filters)
