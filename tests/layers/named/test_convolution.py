"""The convolution equals plain TensorFlow, also where a pipeline's devices share images."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer
from pipemesh.layers.named import Convolution, lowering_scope
from tests.layers.harness import cluster
from tests.layers.named.harness import make_lowering, reference, run, value_of

X = value_of("x", [4, 8, 6, 3])
PARAMS = Convolution.Params().Set(name="conv", input_dim=3, output_dim=4)


@pytest.mark.parametrize(
    ("mesh", "strides", "window"),
    [("rows:4", (1, 1), (3, 3)), ("rows:2;columns:2", (2, 1), (5, 2))],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(mesh, strides, window):
    def plain(w):
        return tf.nn.relu(tf.nn.conv2d(X, w["w"], strides, "SAME") + w["b"])

    params = PARAMS.Copy().Set(padding="SAME", strides=strides, window=window)
    wanted = reference(plain, {"w": [*window, 3, 4], "b": [4]})
    run(params, [X], mesh, "batch:data;height:rows;width:columns").assert_close(*wanted)


def test_without_padding_and_nonlinearity():
    params = PARAMS.Copy().Set(padding="VALID", activation="NONE", use_bias=False)
    wanted = reference(lambda w: tf.nn.conv2d(X, w["w"], 1, "VALID"), {"w": [3, 3, 3, 4]})
    run(params, [X], "rows:2;model:2", "height:rows;features:model").assert_close(*wanted)


def test_one_row_goes_to_each_neighbour():
    result = run(PARAMS, [X], "rows:2", "height:rows")
    calls, sent = result.lowering.costs.rows[("rows",), "permute", "forward"]
    assert (calls, sent) == (2, 2 * 4 * 1 * 6 * 3 * 4)


def test_the_input_is_added():
    params = PARAMS.Copy().Set(output_dim=3, residual=True)
    wanted = reference(
        lambda w: X + tf.nn.relu(tf.nn.conv2d(X, w["w"], 1, "SAME") + w["b"]),
        {"w": [3, 3, 3, 3], "b": [3]},
    )
    run(params, [X], "rows:2", "height:rows").assert_close(*wanted)


def test_flops():
    meta = Convolution.FPropMeta(PARAMS.Copy().Set(strides=(2, 2)), tshape.Shape([4, 8, 6, 3]))
    assert meta.flops == 2 * (3 * 3 * 3) * (4 * 4 * 3 * 4)
    assert meta.out_shapes[0].ToTensorShape().as_list() == [4, 4, 3, 4]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"window": 3}, r"window is 3; give two numbers, as in \(3, 3\)"),
        ({"strides": (1, 0)}, "strides"),
        ({"padding": "same"}, "padding is 'same'; did you mean 'SAME'"),
        ({"activation": "SWIGLU"}, "activation is 'SWIGLU'"),
        ({"output_dim": 0}, "output_dim"),
        ({"residual": True}, "residual adds the input .* input_dim 3, output_dim 4"),
    ],
)
def test_wrong_params(changes, why):
    with pytest.raises(PipelineError, match=why):
        PARAMS.Copy().Set(**changes).Instantiate()


def test_a_result_that_does_not_divide_is_an_error():
    lowering = make_lowering("rows:4", "height:rows")
    with lowering_scope(lowering), py_utils.VariableStore():
        layer = PARAMS.Copy().Set(padding="VALID").Instantiate()
        with pytest.raises(LayoutError, match="height"):
            layer.FPropDefaultTheta(tf.constant(X))


def stack_loss(mesh):
    """Loss and gradients of whole weights of two stages of convolutions."""
    stages = [
        FeatureExtractionLayer.Params().Set(
            name=f"stage{i}",
            sub=[Convolution.Params().Set(name="conv", input_dim=3, output_dim=3, residual=True)],
        )
        for i in range(2)
    ]
    params = PipeliningLayer.Params().Set(
        name="stack", cell_tpl=stages, num_micro_batches=2, random_seed=1
    )
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with cluster(mesh), py_utils.VariableStore():
            layer = params.Instantiate()

            @tf.function(autograph=False)
            def step(x):
                with tf.GradientTape() as tape:
                    y = layer.FPropDefaultTheta(x)
                    loss = tf.reduce_sum(y**2)
                return loss, y, tape.gradient(loss, layer.vars.Flatten())

            return [np.asarray(v) for v in tf.nest.flatten(step(tf.constant(X)))]
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


@pytest.mark.slow
def test_stages_hand_parts_of_images_on():
    found = stack_loss("layers:2;data:2;rows:2 batch:data;height:rows")
    for mine, theirs in zip(found, stack_loss("layers:1"), strict=True):
        np.testing.assert_allclose(mine, theirs, 1e-4, 1e-4)
