"""Tensors with named dims: operators, errors, loops, branches and functions."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh, Shape

MESH = Mesh.from_text("data:2;model:2")
RULES = LayoutRules.from_text("x:data;y:model;v:model")
LOWERING = PlacementLowering(MESH, RULES, [f"CPU:{i}" for i in range(4)])


def zeros(shape, dtype=np.float32):
    sizes = Shape.from_text(shape).sizes
    return ops.import_tensor(LOWERING, np.zeros(sizes, dtype), shape)


def test_a_tensor_has_a_layout_and_an_identity():
    x, y = zeros("x:4;y:8;z:3"), zeros("x:4;y:8;z:3")
    assert repr(x) == "Tensor('x:4/data;y:8/model;z:3', float32)"
    assert x.split_axes == ("data", "model")
    assert [tuple(part.shape) for part in x.slices] == [(2, 4, 3)] * 4
    assert [part.device[-5:] for part in x.slices] == [f"CPU:{i}" for i in range(4)]
    assert {x: 1, y: 2}[x] == 1 and len({x, y, x}) == 2


def test_operators_find_dims_by_name_and_take_numbers():
    x = ops.import_tensor(LOWERING, np.arange(4.0), "x:4")
    y = ops.import_tensor(LOWERING, np.arange(2.0), "y:2")
    a, b = np.arange(4.0)[:, None], np.arange(2.0)
    for got, want in (
        (x + y, a + b),
        (1 - x * y, 1 - a * b),
        ((x - y) / 2, (a - b) / 2),
        (1 / (x + y + 1), 1 / (a + b + 1)),
        (-(x**2) + y, -(a**2) + b),
        ((x < y) | (x >= 3), (a < b) | (a >= 3)),
        (~(x > y) & (x <= y), ~(a > b) & (a <= b)),
        ((x > y) ^ (x <= 1), (a > b) ^ (a <= 1)),
        (x // 2 + 7 // (y + 1), a // 2 + 7 // (b + 1)),
        (x % 3 - 5 % (y + 2), a % 3 - 5 % (b + 2)),
        (abs(-x) + 2**y, a + 2**b),
        (np.float64(2) * x + y, 2 * a + b),
        (tf.constant(2.0, tf.float64) * x + y, 2 * a + b),
    ):
        np.testing.assert_allclose(ops.export_tensor(got), want)


def test_equality_compares_elements():
    """As comparisons of objects, masks were `True` and `False` for the whole tensor."""
    array = np.array([0.0, 1.0, 0.0, 2.0])
    x = ops.import_tensor(LOWERING, array, "x:4")
    y = ops.import_tensor(LOWERING, np.arange(2.0), "y:2")
    for got, want in (
        (x != 0, array != 0),
        (x == 1.0, array == 1),
        (np.float64(1) == x, array == 1),
        (x == tf.constant(2.0, tf.float64), array == 2),
        (x == y, array[:, None] == np.arange(2.0)),
    ):
        assert got.dtype == tf.bool
        np.testing.assert_array_equal(got.numpy(), want)


def test_a_tensor_is_read_as_a_whole_array_or_number():
    x = ops.import_tensor(LOWERING, np.arange(8.0).reshape(4, 2), "x:4;y:2")
    np.testing.assert_array_equal(x.numpy(), np.arange(8.0).reshape(4, 2))
    total = ops.reduce_sum(x)
    assert (float(total), int(total), f"{total:.1f}") == (28, 28, "28.0")
    whole = ops.import_tensor(x.lowering, np.int64(2**53 + 1), "")
    assert (int(whole), f"{whole:d}") == (2**53 + 1, str(2**53 + 1))
    with tf.Graph().as_default():
        for read in (lambda: zeros("x:4").numpy(), lambda: float(ops.reduce_sum(zeros("x:4")))):
            with pytest.raises(TypeError, match="no value while a graph is built"):
                read()


def test_number_gets_the_gradient_of_its_copies_once():
    array = np.arange(4.0)
    for watched in (tf.constant(3.0, tf.float64), tf.Variable(3.0, dtype=tf.float64)):

        def step(number=watched):
            with tf.GradientTape() as tape:
                tape.watch(number)
                # Split over one axis of two, so there are two copies of each slice.
                x = ops.import_tensor(LOWERING, array, "x:4")
                loss = ops.reduce_sum(number * x * x)
            return tape.gradient(loss, number)

        assert step() == 14
        assert tf.function(step, autograph=False)() == 14


def test_convolution_of_an_empty_batch_is_empty_eagerly():
    x, filters = zeros("x:0;rows:8;in:3"), zeros("w:3;in:3;out:4")
    found = ops.conv1d(x, filters, {"rows": "w"}, padding="SAME")
    assert str(found.shape) == "x:0;rows:8;out:4"
    assert ops.export_tensor(found).shape == [0, 8, 4]


VX_RULES = LayoutRules.from_text("v:x")
ONE = PlacementLowering(Mesh.from_text("x:1"), VX_RULES, ["CPU:0"])
TWO = PlacementLowering(Mesh.from_text("x:2"), VX_RULES, ["CPU:0", "CPU:1"])
ARRAY = np.arange(4.0)


def given(lowering, array=ARRAY):
    return ops.import_tensor(lowering, array, f"v:{array.shape[0]}")


def looped(x):
    """A loop whose body communicates, a branch, and a function in it."""
    y = tf.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, 3.0 * ops.softmax(y, "v")), (0, x))[
        1
    ]
    up = ops.reduce_sum(y).slices[0] > 0.5
    y = tf.cond(up, lambda: ops.cumsum(y, "v"), lambda: y)
    return tf.function(ops.tanh)(y)


def by_autograph(x):
    y = x
    for i in tf.range(3):
        y = 3.0 * ops.softmax(y, "v")
        if i > 1:
            y = ops.cumsum(y, "v")
    return ops.tanh(y)


def first_and_second(program, x):
    with tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = program(x)
            loss = ops.reduce_sum(ops.square(y))
        first = ops.gradients(loss, x, tape)
        slope = ops.reduce_sum(ops.square(first))
    return y, first, ops.gradients(slope, x, outer)


@pytest.fixture(scope="module")
def expected():
    return [part.numpy() for part in first_and_second(looped, given(ONE))]


@pytest.mark.parametrize(("program", "wrap"), [(looped, lambda f: f), (by_autograph, tf.function)])
def test_loops_and_branches_carry_named_tensors(program, wrap, expected):
    found = wrap(first_and_second)(program, given(TWO))
    for part, want in zip(found, expected, strict=True):
        assert str(part.layout) == "v:4/x"
        np.testing.assert_allclose(part.numpy(), want, rtol=1e-12, atol=1e-15)


def test_loops_and_branches_carry_named_tensors_in_cores(expected):
    """TensorFlow raised errors of its own where a branch or a function was differentiated twice."""
    cores, args = Cores(TWO.mesh, TWO.devices), [[tf.constant(ARRAY)]] * 2

    def program(lowering, array):
        found = first_and_second(looped, given(lowering, array))
        return [ops.export_tensor(part) for part in found]

    in_graph = cores.function(program, VX_RULES, tf.TensorSpec([4], tf.float64))(args)
    for found in (*in_graph, *cores.run_eagerly(program, VX_RULES, args)):
        for part, want in zip(found, expected, strict=True):
            np.testing.assert_allclose(part, want, rtol=1e-12, atol=1e-15)


def test_loops_and_branches_in_a_graph_of_tensorflow_1(expected):
    with tf.Graph().as_default():
        x = given(TWO)
        y = looped(x)
        grad = ops.gradients(ops.reduce_sum(ops.square(y)), x)
        with tf.compat.v1.Session() as session:
            found = session.run([ops.export_tensor(y), ops.export_tensor(grad)])
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-12)
    np.testing.assert_allclose(found[1], expected[1], rtol=1e-12, atol=1e-15)


def test_functions_take_and_return_named_tensors():
    traced = []

    @tf.function
    def double(x, more):
        traced.append(x.shape)
        return {"sum": x + more[0], "same": [x]}

    x = given(TWO)
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = double(x, (x,))
        loss = ops.reduce_sum(ops.square(found["sum"]))
    np.testing.assert_array_equal(found["sum"].numpy(), 2 * ARRAY)
    np.testing.assert_array_equal(found["same"][0].numpy(), ARRAY)
    np.testing.assert_array_equal(ops.gradients(loss, x, tape).numpy(), 8 * ARRAY)
    double(given(TWO, ARRAY + 1), (x,))
    assert len(traced) == 1
    # Other sizes, dtypes and lowerings are traced anew.
    for other in (given(TWO, np.arange(6.0)), given(TWO, np.arange(4)), given(ONE)):
        double(other, (other,))
    assert len(traced) == 4


def test_functions_take_named_tensors_without_dims():
    x = ops.reduce_sum(given(TWO))
    assert float(tf.function(lambda total: total * 2.0)(x)) == 12


def test_a_loop_refuses_a_tensor_that_grows():
    def longer(y):
        for _ in tf.range(3):
            y = ops.concat([y, y], "v")
        return y

    with pytest.raises(ValueError, match=r"'y' has shape \(2,\) before the loop"):
        tf.function(longer)(given(TWO))


def test_no_gradient_is_none_and_not_an_empty_tensor():
    x, other = given(TWO), given(TWO)
    with tf.GradientTape() as tape:
        tape.watch([x, other])
        loss = ops.reduce_sum(x)
    assert tape.gradient(loss, {"other": other}) == {"other": None}


def test_what_recomputes_or_maps_structures_keeps_named_tensors():
    x = given(TWO)
    with tf.GradientTape() as tape:
        tape.watch(x)
        loss = ops.reduce_sum(tf.recompute_grad(ops.tanh)(x))
    np.testing.assert_allclose(
        ops.gradients(loss, x, tape).numpy(), 1 - np.tanh(ARRAY) ** 2, rtol=1e-12
    )
    assert [tuple(part.shape) for part in tf.nest.flatten(x)] == [(2,), (2,)]
    np.testing.assert_array_equal(tf.nest.map_structure(tf.negative, x).numpy(), -ARRAY)
