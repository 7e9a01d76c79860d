"""Tensors with named dims: operators, errors, loops, branches and functions."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, ShapeError
from pipemesh.lowering import Cores, PlacementLowering, Tensor, ops
from pipemesh.mesh import Dim, LayoutRules, Mesh, Shape

MESH = Mesh.from_text("data:2;model:2")
RULES = LayoutRules.from_text("x:data;y:model;v:model")
LOWERING = PlacementLowering(MESH, RULES, [f"CPU:{i}" for i in range(4)])


def zeros(shape, dtype=np.float32):
    sizes = Shape.from_text(shape).sizes
    return ops.import_tensor(LOWERING, np.zeros(sizes, dtype), shape)


def test_the_layout_follows_from_the_shape():
    x = zeros("x:4;y:8;z:3")
    assert repr(x) == "Tensor('x:4/data;y:8/model;z:3', float32)"
    assert x.split_axes == ("data", "model")
    assert [tuple(part.shape) for part in x.slices] == [(2, 4, 3)] * 4
    assert [part.device[-5:] for part in x.slices] == [f"CPU:{i}" for i in range(4)]


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
    array = np.array([0.0, 1.0, 0.0, 2.0])
    x = ops.import_tensor(LOWERING, array, "x:4")
    # As comparisons of objects, masks were `True` and `False` for the whole tensor.
    np.testing.assert_array_equal((x != 0).numpy(), array != 0)
    np.testing.assert_array_equal((x == 1.0).numpy(), array == 1)
    np.testing.assert_array_equal((np.float64(1) == x).numpy(), array == 1)
    np.testing.assert_array_equal((x == tf.constant(2.0, tf.float64)).numpy(), array == 2)
    np.testing.assert_array_equal(ops.where(x != 0, 1 / x, x).numpy(), [0, 1, 0, 0.5])
    y = ops.import_tensor(LOWERING, np.arange(2.0), "y:2")
    np.testing.assert_array_equal((x == y).numpy(), array[:, None] == np.arange(2.0))
    assert (x == x).dtype == tf.bool


def test_hashes_are_by_identity():
    x, y = zeros("x:4"), zeros("x:4")
    assert {x: 1, y: 2}[x] == 1
    assert len({x, y, x}) == 2


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


def test_a_number_of_tensorflow_gets_the_gradient_of_its_copies_once():
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


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (TypeError, lambda: zeros("x:4") == None, "`is` compares objects"),  # noqa: E711
        (TypeError, lambda: zeros("x:4") != "x", "not with 'x'"),
        (ShapeError, lambda: zeros("x:4") == np.zeros(4), "no named dims"),
        (TypeError, lambda: zeros("x:4") in [zeros("x:4")], "neither true nor false"),
        (TypeError, lambda: 0 < zeros("x:4") < 1, "neither true nor false"),
        (TypeError, lambda: float(zeros("x:4")), "has named dims, so it is no number"),
        (
            ShapeError,
            lambda: ops.conv1d(
                zeros("batch:2;x:4;in:2"), zeros("w:3;inn:2;out:5"), {"x": "w"}, padding="SAME"
            ),
            "share no dim to sum over.*did you mean 'in'",
        ),
        (
            ShapeError,
            lambda: ops.einsum([zeros("batch:2;hidden:4"), zeros("hiden:4;out:2")], ["out"]),
            "'hidden:4' of one operand and 'hiden:4' of another",
        ),
        (ShapeError, lambda: zeros("x:4") + zeros("x:2"), "size 4 in 'x:4' and 2 in 'x:2'"),
        (LayoutError, lambda: zeros("y:4") * zeros("v:4"), "'y' and 'v'.*'model'"),
        (ShapeError, lambda: zeros("x:4") + np.zeros(4), r"shape \(4,\) has no named dims"),
        (TypeError, lambda: tf.zeros([2, 2]) * zeros("x:4;y:4"), "import the array"),
        (ShapeError, lambda: ops.where(zeros("x:4") > 0, [1.0] * 4, 0.0), "no named dims"),
        (ShapeError, lambda: ops.einsum([], ["x"]), "no tensor was given"),
        (ShapeError, lambda: ops.einsum([zeros("x:4;y:4")], "x,y"), r"'x,y' is no name of a dim"),
        (
            ShapeError,
            lambda: ops.einsum([zeros("x:4"), zeros("x:4", np.float64)], []),
            "dtypes float32, float64; ops.cast",
        ),
        (
            ShapeError,
            lambda: ops.conv1d(
                zeros("x:4;c:2"), zeros("w:3;c:2", np.float64), {"x": "w"}, padding="SAME"
            ),
            "dtypes float32, float64; ops.cast",
        ),
        (TypeError, lambda: bool(zeros("x:4")), "neither true nor false"),
        (TypeError, lambda: np.array(zeros("x:4")), "export it"),
        (LayoutError, lambda: ops.einsum([zeros("y:4"), zeros("v:4")], []), "rename one of"),
        (ShapeError, lambda: ops.einsum([zeros("x:4")], ["z"]), "no dim is called 'z'"),
        (ShapeError, lambda: ops.reduce_sum(zeros("batch:4"), "bacth"), "mean 'batch'"),
        (ShapeError, lambda: ops.reduce_mean(zeros("x:4", np.int32)), "cast them first"),
        (ShapeError, lambda: ops.reshape(zeros("x:4"), "x:2;z:3"), "4 elements and 'x:2;z:3' 6"),
        (ShapeError, lambda: ops.rename(zeros("x:4;z:4"), {"x": "z"}), "'z' occurs twice"),
        (LayoutError, lambda: ops.rename(zeros("x:4;y:4"), {"x": "v"}), "'v' and 'y'"),
        (ShapeError, lambda: ops.transpose(zeros("x:4;y:4"), ["x"]), "no order of the dims"),
        (ShapeError, lambda: ops.one_hot(zeros("x:4", np.int32), Dim("x", 2)), "occurs twice"),
        (ShapeError, lambda: ops.gather(zeros("v:4"), zeros("v:4", np.int32), "v"), "rename it"),
        (ShapeError, lambda: ops.broadcast_to(zeros("x:4"), Shape.of(y=2)), "lacks 'x:4'"),
        (ShapeError, lambda: ops.dropout(zeros("x:4"), rate=1.0, seed=[1, 2]), "rate is 1.0"),
        (
            ShapeError,
            lambda: ops.dropout(zeros("x:4"), rate=0.5, seed=[1, 2], noise_dims=Shape.of(q=2)),
            "'q:2' are no dims",
        ),
        (ShapeError, lambda: ops.import_tensor(LOWERING, [1.0], "x:2"), "cannot have the shape"),
        (LayoutError, lambda: zeros("x:3"), "size 3.*2 equal slices.*'x:data'"),
        (
            ShapeError,
            lambda: Tensor(LOWERING, (tf.zeros([4]),) * 4, Shape.of(x=4)),
            r"has sizes \[2\]",
        ),
        (
            ShapeError,
            lambda: zeros("x:4") + ops.import_tensor(_other(), [0.0] * 4, "x:4"),
            "2 lowerings",
        ),
    ],
)
def test_what_does_not_fit_is_named(error, call, message):
    with pytest.raises(error, match=message):
        call()


def _other():
    return PlacementLowering(Mesh.from_text("data:1"), LayoutRules(), ["CPU:0"])


def test_the_convolution_of_an_empty_batch_is_empty_without_a_graph_as_well():
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

    run = cores.function(program, VX_RULES, tf.TensorSpec([4], tf.float64))
    eagerly = functools.partial(cores.run_eagerly, program, VX_RULES)
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
        lambda: cores.function(program, VX_RULES, tf.TensorSpec([4], tf.float64)),
        lambda: on_cores(functools.partial(cores.run_eagerly, program, VX_RULES)),
    ):
        with pytest.raises(ShapeError, match=r"returns Tensor.*ops\.export_tensor"):
            run()
