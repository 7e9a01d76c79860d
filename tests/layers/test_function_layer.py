"""Plain functions in stacks of lingvo, pipelined, equal the functions themselves."""

import contextlib
import functools

import keras
import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils, tshape

from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers import (
    FeatureExtractionLayer,
    FunctionLayer,
    PartitionSequentialLayers,
    PipeliningLayer,
)
from tests.layers.harness import cluster

X = np.random.default_rng(0).normal(size=[8, 4]).astype(np.float32)


def noisy(x):
    return tf.nn.dropout(x, 0.5)


def dense():
    return layers.FCLayer.Params().Set(input_dim=4, output_dim=4, activation="TANH")


def stages(number):
    return PartitionSequentialLayers(
        [dense(), tf.square, dense(), noisy, lambda x: (x, x + 1), tf.add],
        number,
        tshape.Shape([8, 4]),
    )


def plain():
    (stage,) = stages(1)
    return FeatureExtractionLayer.Params().Set(name="plain", sub=stage.sub)


def test_a_list_with_functions_is_cut_and_equals_the_plain_stack(run):
    stack = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages(3), num_micro_batches=4)
    run(stack, [X], num_devices=3).assert_close(run(plain(), [X]))


def test_flops_are_those_of_products():
    matrix = tf.ones([4, 6])
    params = FunctionLayer.Params().Set(name="f", function=lambda x, y: (x @ matrix, y))
    meta = FunctionLayer.FPropMeta(params, tshape.Shape([8, 4]), None)
    assert meta.flops == 2 * 8 * 4 * 6
    assert [shape.ToTensorShape().as_list() for shape in meta.out_shapes] == [[8, 6]]
    params.flops = lambda *shapes: 7
    assert FunctionLayer.FPropMeta(params, tshape.Shape([8, 4]), None).flops == 7


def test_what_is_no_function():
    with pytest.raises(PipelineError, match="function is 3; give a function of tensors"):
        FunctionLayer.Params().Set(name="f", function=3).Instantiate()
    with pytest.raises(PipelineError, match=r"sub\[0\] .* write FunctionLayer.Params\(\)"):
        FeatureExtractionLayer.Params().Set(name="stage", sub=[tf.square]).Instantiate()
    with pytest.raises(PartitionError, match=r"write FCLayer.Params\(\)"):
        PartitionSequentialLayers([layers.FCLayer], 1, tshape.Shape([8, 4]))


def test_live_layers_are_refused_by_name():
    with tf.Graph().as_default():
        live = dense().Set(name="live").Instantiate()
    for layer, give in (
        (live, r"a FCLayer, .*give FCLayer\.Params\(\)"),
        (
            keras.layers.Dense(4),
            r"a Dense, .*give KerasLayer\.Params\(\)\.Set\(name=\.\.\., layer=D",
        ),
    ):
        with pytest.raises(PartitionError, match=f"layer 1 of what is to be cut is {give}"):
            PartitionSequentialLayers([dense(), layer], 1, tshape.Shape([8, 4]))
        with pytest.raises(PipelineError, match=give):
            FeatureExtractionLayer.Params().Set(name="stage", sub=[layer]).Instantiate()
        with pytest.raises(PipelineError, match=f"f: function is {give}"):
            FunctionLayer.Params().Set(name="f", function=layer).Instantiate()


class Dense(tf.Module):
    """Holds a weight, and is called, or one of its methods is."""

    def __init__(self, seed):
        super().__init__()
        value = np.random.default_rng(seed).normal(size=[4, 4]).astype(np.float32)
        self.w = tf.compat.v1.get_variable(f"w{seed}", initializer=value, use_resource=True)

    def __call__(self, x):
        return tf.tanh(x @ self.w)

    def residual(self, x):
        return x + self(x)


def objects():
    """Live objects that can be called, and their weights."""
    a, b, c = map(Dense, range(3))
    return [a, b.residual, functools.partial(lambda x, w: tf.sin(x @ w), w=c.w)], [a.w, b.w, c.w]


def outputs_and_gradients(function, weights):
    with tf.GradientTape() as tape:
        y = function(tf.constant(X))
        loss = tf.reduce_sum(y**2)
    return [y, *tape.gradient(loss, weights)]


@pytest.mark.parametrize("mode", ["tf1", "function", "eager"])
def test_live_objects_get_their_gradients(mode):
    py_utils.SetEagerMode(mode != "tf1", test_mode=True)
    graph = tf.Graph() if mode == "tf1" else None
    try:
        with graph.as_default() if graph else contextlib.nullcontext(), cluster(2):
            py_utils.GetOrCreateGlobalStepVar()
            calls, weights = objects()
            # What is made of params must see what is assigned later.
            assign = [w.assign(w * 2) for w in weights]

            def plain(x):
                for call in calls:
                    x = call(x)
                return x

            functions = [plain]
            for pipelined in (True, False):
                params = PipeliningLayer.Params().Set(
                    name=f"stack{pipelined}",
                    num_micro_batches=4,
                    pipelined=pipelined,
                    cell_tpl=PartitionSequentialLayers(calls, 2, tshape.Shape([8, 4])),
                )
                functions.append(params.Instantiate().FPropDefaultTheta)
            computed = []
            for function in functions:
                compute = functools.partial(outputs_and_gradients, function, weights)
                if mode == "function":
                    compute = tf.function(compute, autograph=False)
                computed.append(compute())
            if graph:
                with tf.compat.v1.Session() as session:
                    session.run(tf.compat.v1.global_variables_initializer())
                    session.run(assign)
                    computed = session.run(computed)
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
    wanted, *others = computed
    for found in others:
        for a, b in zip(found, wanted, strict=True):
            np.testing.assert_allclose(a, b, 1e-5, 1e-6)


def test_a_variable_of_the_function_is_trained():
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        factor = tf.Variable(3.0)
        with py_utils.VariableStore():
            layer = (
                FunctionLayer.Params().Set(name="f", function=lambda x: x * factor).Instantiate()
            )
        with tf.GradientTape() as tape:
            y = tf.reduce_sum(layer.FPropDefaultTheta(tf.constant(X)))
        np.testing.assert_allclose(tape.gradient(y, factor), X.sum(), 1e-4)
    finally:
        py_utils.SetEagerMode(False, test_mode=True)
