"""Values from outside that functions of slices and layer functions may use."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import GradientError, PipelineError
from pipemesh.lowering import PlacementLowering, Tensor, ops
from pipemesh.lowering.differentiate import call_alone, check_no_layers_axis, lost_in_layer
from pipemesh.lowering.simd.collectives import TpuLowering
from pipemesh.lowering.variable import Constant, Variable
from pipemesh.mesh import LayoutRules, Mesh, Shape
from pipemesh.recurrent.circular import SimdPipeline
from tests.pairwise import in_turn, pairwise

LOWERING = PlacementLowering(
    Mesh.from_text("layers:2;data:2"), LayoutRules(), [f"CPU:{i}" for i in range(4)]
)


@pytest.mark.parametrize(
    ("make", "loses"),
    [
        (lambda x: tf.constant([1.0, 2.0]), False),
        (tf.stop_gradient, False),
        (lambda x: tf.identity(tf.stop_gradient(x * 2)), False),
        (lambda x: tf.cast(x, tf.int32), False),
        (lambda x: tf.cast(x > 0.5, tf.int32), False),
        (lambda x: x, True),
        (lambda x: tf.identity(x) * 2.0, True),
    ],
)
def test_what_would_lose_its_gradient_is_an_error(make, loses):
    """In the body of a loop that uses what was made outside of it."""

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

    error = pytest.raises(PipelineError, match=r"pass it among the weights, or through tf\.stop")
    with error if loses else contextlib.nullcontext():
        assert run(tf.ones([3]))[1] >= 9


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


ONE = Mesh.from_text("data:1"), LayoutRules()
ON_ONE_DEVICE = {
    "placement": lambda: PlacementLowering(*ONE, ["CPU:0"]),
    "simd": lambda: TpuLowering(*ONE, tf.constant(0)),
}


@pytest.mark.parametrize(
    ("kind", "mode", "lowers"), pairwise(list(READS), MODES, list(ON_ONE_DEVICE))
)
def test_mapped_function_must_not_read_a_variable(kind, mode, lowers):
    def run(variable):
        lowering = ON_ONE_DEVICE[lowers]()
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


def test_mapped_function_must_not_use_a_tensor():
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


LAYERS = {
    "imported": lambda x, variable: x * ops.import_tensor(x.lowering, variable, "io:2"),
    "mapped": lambda x, variable: Tensor(
        x.lowering, x.lowering.map(lambda s: s * variable, x.slices), x.shape
    ),
    "a number": lambda x, variable: x * variable[0],
    "Variable.tensor": lambda x, variable: x * variable.tensor(x.lowering),
}


def pipelined():
    lowering = PlacementLowering(MESH, RULES, DEVICES)
    x = ops.import_tensor(lowering, tf.ones([4, 2]), "batch:4;io:2")
    return lowering, SimdPipeline(MESH, num_layers=2, num_microbatches=2), x


@pytest.mark.parametrize(("kind", "mode"), in_turn(list(LAYERS), MODES))
def test_layer_must_not_read_a_variable(kind, mode):
    def make():
        if kind != "Variable.tensor":
            return tf.Variable([2.0, 3.0], name="mine")
        layout = RULES.tensor_layout(Shape.of(io=2), MESH)
        return Variable.create("mine", layout, DEVICES, Constant(2.0))

    def run(variable):
        lowering, pipeline, x = pipelined()
        w = ops.import_tensor(lowering, tf.ones([1, 2, 1, 2]), pipeline.stacked("io:2"))
        with tf.GradientTape():
            return pipeline(
                lambda x, weights, _: LAYERS[kind](x, variable) + weights["w"], x, {"w": w}
            )

    with pytest.raises((PipelineError, GradientError), match="from outside, wh"):
        call_with(make, run, mode)


def test_layer_must_not_use_a_tensor_eagerly():
    lowering, pipeline, x = pipelined()
    table = tf.constant([2.0, 3.0])

    def run():
        return pipeline(lambda x, _, __: x * ops.import_tensor(lowering, table, "io:2"), x, {})

    with tf.GradientTape() as tape:
        np.testing.assert_array_equal(run().numpy()[0], [4, 9])
        tape.watch(table)
        with pytest.raises(PipelineError, match="from outside, which would get no gradient"):
            run()
