"""Plain functions in stacks of lingvo, pipelined, equal the functions themselves."""

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
from tests.layers.harness import run_tf1, run_tf2

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


@pytest.mark.parametrize("run", [run_tf1, run_tf2])
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
