"""What functions of slices and layer functions may use besides their arguments."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError, PipelineError
from pipemesh.lowering import PlacementLowering, SimdLowering, Tensor, ops
from pipemesh.lowering.differentiate import call_alone, check_no_layers_axis, lost_in_layer
from pipemesh.lowering.variable import Constant, Variable
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular import SimdPipeline

LOWERING = PlacementLowering(
    Mesh.from_text("layers:2;data:2"), LayoutRules(), [f"CPU:{i}" for i in range(4)]
)


def use(make):
    """Uses in the body of a loop what `make` made outside of it."""

    @tf.function(autograph=False)
    def run(x):
        outside = make(x)

        def body(i, y):
            y = call_alone(
                lambda: y + tf.cast(tf.reduce_sum(outside), tf.float32),
                [y],
                lambda result: [result],
                lost_in_layer,
            )
            return i + 1, y

        return tf.while_loop(lambda i, _: i < 3, body, [tf.constant(0), tf.constant(0.0)])

    return run(tf.ones([3]))[1].numpy()


@pytest.mark.parametrize(
    "make",
    [
        lambda x: tf.constant([1.0, 2.0]),
        tf.stop_gradient,
        lambda x: tf.identity(tf.stop_gradient(x * 2)),
        lambda x: tf.cast(x, tf.int32),
        lambda x: tf.cast(x > 0.5, tf.int32),
    ],
)
def test_what_has_no_gradient_may_be_used(make):
    assert use(make) >= 9


@pytest.mark.parametrize("make", [lambda x: x, lambda x: tf.identity(x) * 2.0])
def test_what_would_lose_its_gradient_is_an_error(make):
    with pytest.raises(PipelineError, match=r"pass it among the weights, or through tf\.stop"):
        use(make)


@pytest.mark.parametrize(("axis", "fails"), [("data", False), ("layers", True)])
def test_communication_along_the_layers_is_an_error(axis, fails):
    error = pytest.raises(PipelineError, match="every stage works on another microbatch")
    with error if fails else contextlib.nullcontext(), check_no_layers_axis(LOWERING):
        LOWERING.all_reduce(tuple(tf.ones([2]) for _ in range(4)), [axis])


# Variables reach a function as resources, not as tensors.

MODES = ["eagerly", "in tf.function", "in TensorFlow 1"]


def call_with(make_variable, function, mode):
    """Calls a function of a variable."""
    if mode == "in TensorFlow 1":
        with tf.Graph().as_default():
            return function(make_variable())
    variable = make_variable()
    if mode == "eagerly":
        return function(variable)
    return tf.function(lambda: function(variable), autograph=False)()


READS = {
    "a product": lambda v: lambda s: s * v,
    "its value": lambda v: lambda s: s + tf.exp(v.read_value()),
    "in a function": lambda v: tf.function(lambda s: s * v, autograph=False),
    "in a branch": lambda v: lambda s: tf.cond(s[0, 0] > 0, lambda: s * v, lambda: s),
}


def one_device(lowers):
    mesh = Mesh.from_text("data:1")
    if lowers == "placement":
        return PlacementLowering(mesh, LayoutRules(), ["CPU:0"])
    return SimdLowering(mesh, LayoutRules(), None, tf.constant(0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", READS)
@pytest.mark.parametrize("lowers", ["placement", "simd"])
def test_a_variable_that_a_mapped_function_reads_would_lose_its_gradient(lowers, kind, mode):
    def run(variable):
        lowering = one_device(lowers)
        x = ops.import_tensor(lowering, tf.ones([4, 2]), "batch:4;io:2")
        return lowering.map(READS[kind](variable), x.slices)[0]

    with pytest.raises(GradientError, match=r"the variable 'mine:0' from outside.*make it an oper"):
        call_with(lambda: tf.Variable(2.0, name="mine"), run, mode)
    # What is not trainable has no gradient to lose.
    assert call_with(lambda: tf.Variable(2.0, trainable=False), run, mode).shape == (4, 2)


def test_a_variable_of_the_first_tensorflow_is_noticed_as_well():
    with tf.Graph().as_default():
        variable = tf.compat.v1.get_variable("mine", [], use_resource=False)
        x = ops.import_tensor(LOWERING, tf.ones([4, 2]), "batch:4;io:2")
        with pytest.raises(GradientError, match="the tensor 'mine/read:0' from outside"):
            LOWERING.map(lambda s: s * variable, x.slices)


def test_a_tensor_that_a_mapped_function_uses_would_lose_its_gradient():
    @tf.function(autograph=False)
    def run(table, stop):
        used = tf.stop_gradient(table) if stop else table * 2.0
        x = ops.import_tensor(LOWERING, tf.ones([4, 2]), "batch:4;io:2")
        return LOWERING.map(lambda s: s * used, x.slices)[0]

    with pytest.raises(GradientError, match="the tensor 'mul:0' from outside"):
        run(tf.ones([4, 2]), False)
    np.testing.assert_array_equal(run(tf.ones([4, 2]), True), np.ones([4, 2]))


MESH, RULES = Mesh.from_text("layers:2"), LayoutRules.from_text("layers:layers")
DEVICES = ["CPU:0", "CPU:1"]


def imported(x, variable):
    return x * ops.import_tensor(x.lowering, variable, "io:2")


def mapped(x, variable):
    return Tensor(x.lowering, x.lowering.map(lambda s: s * variable, x.slices), x.shape)


LAYERS = {
    "imported": imported,
    "mapped": mapped,
    "a number": lambda x, variable: x * variable[0],
    "Variable.tensor": lambda x, variable: x * variable.tensor(x.lowering),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", LAYERS)
def test_a_variable_that_a_layer_reads_would_lose_its_gradient(kind, mode):
    def make():
        if kind != "Variable.tensor":
            return tf.Variable([2.0, 3.0], name="mine")
        layout = RULES.tensor_layout(Shape.of(io=2), MESH)
        return Variable.create("mine", layout, DEVICES, Constant(2.0))

    def run(variable):
        lowering = PlacementLowering(MESH, RULES, DEVICES)
        pipeline = SimdPipeline(MESH, num_layers=2, num_microbatches=2)
        x = ops.import_tensor(lowering, tf.ones([4, 2]), "batch:4;io:2")
        w = ops.import_tensor(lowering, tf.ones([1, 2, 1, 2]), pipeline.stacked("io:2"))
        with tf.GradientTape():
            return pipeline(
                lambda x, weights, _: LAYERS[kind](x, variable) + weights["w"], x, {"w": w}
            )

    with pytest.raises((PipelineError, GradientError), match="from outside, wh"):
        call_with(make, run, mode)


def test_a_tensor_that_a_layer_uses_eagerly_would_lose_its_gradient():
    lowering = PlacementLowering(MESH, RULES, DEVICES)
    pipeline = SimdPipeline(MESH, num_layers=2, num_microbatches=2)
    x = ops.import_tensor(lowering, tf.ones([4, 2]), "batch:4;io:2")
    table = tf.constant([2.0, 3.0])

    def run():
        return pipeline(lambda x, _, __: x * ops.import_tensor(lowering, table, "io:2"), x, {})

    with tf.GradientTape() as tape:
        np.testing.assert_array_equal(run().numpy()[0], [4, 9])
        tape.watch(table)
        with pytest.raises(PipelineError, match="from outside, which would get no gradient"):
            run()
