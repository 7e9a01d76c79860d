"""Named tensors in loops and branches, and across the boundary of a `tf.function`."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh

RULES = LayoutRules.from_text("v:x")
ONE = PlacementLowering(Mesh.from_text("x:1"), RULES, ["CPU:0"])
TWO = PlacementLowering(Mesh.from_text("x:2"), RULES, ["CPU:0", "CPU:1"])
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


@pytest.mark.parametrize("program", [looped, by_autograph], ids=lambda f: f.__name__)
@pytest.mark.parametrize("wrap", [lambda f: f, tf.function], ids=["eager", "function"])
def test_loops_and_branches_carry_named_tensors(program, wrap, expected):
    found = wrap(first_and_second)(program, given(TWO))
    for part, want in zip(found, expected, strict=True):
        assert str(part.layout) == "v:4/x"
        np.testing.assert_allclose(part.numpy(), want, rtol=1e-12, atol=1e-15)


@pytest.fixture(scope="module")
def cores():
    return Cores(Mesh.from_text("x:2"), ["CPU:0", "CPU:1"])


def on_cores(run):
    """What each core makes of the whole array."""
    return run([[tf.constant(ARRAY)]] * 2)


def test_loops_and_branches_carry_named_tensors_in_cores(cores, expected):
    """TensorFlow raised errors of its own where a branch or a function was differentiated twice."""

    def program(lowering, array):
        found = first_and_second(looped, given(lowering, array))
        return [ops.export_tensor(part) for part in found]

    run = cores.function(program, RULES, tf.TensorSpec([4], tf.float64))
    eagerly = functools.partial(cores.run_eagerly, program, RULES)
    for found in (*on_cores(run), *on_cores(eagerly)):
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
    with pytest.raises(ValueError, match=r"'y' has shape \(2,\) before the loop"):
        tf.function(by_autograph_longer)(given(TWO))


def by_autograph_longer(x):
    y = x
    for _ in tf.range(3):
        y = ops.concat([y, y], "v")
    return y


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


def test_a_program_of_cores_returns_no_named_tensor(cores):
    def program(lowering, array):
        return {"loss": [given(lowering, array)]}

    for run in (
        lambda: cores.function(program, RULES, tf.TensorSpec([4], tf.float64)),
        lambda: on_cores(functools.partial(cores.run_eagerly, program, RULES)),
    ):
        with pytest.raises(ShapeError, match=r"returns Tensor.*ops\.export_tensor"):
            run()
