"""Cross entropy equals TensorFlow's under every layout."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers.named import SoftmaxCrossEntropy, lowering_scope
from tests.layers.named.harness import MESHES, RULES, make_lowering, reference, run, value_of

X = value_of("x", [2, 3, 5])
LABELS = np.array([[0, 7, 3], [4, 4, 6]], np.int32)
WEIGHTS = np.array([[1, 0.5, 0], [1, 1, 2]], np.float32)
PARAMS = SoftmaxCrossEntropy.Params().Set(name="softmax", input_dim=5, vocab_size=8)


def plain(smoothing=0.0, weights=WEIGHTS, x=X):
    def loss(w):
        logits = tf.einsum("btd,dv->btv", x, w["w"]) + w["b"]
        probabilities = tf.one_hot(LABELS, 8) * (1 - smoothing) + smoothing / 8
        xent = tf.nn.softmax_cross_entropy_with_logits(probabilities, logits)
        return tf.reduce_sum(xent * weights), tf.constant(weights.sum()), xent

    return reference(loss, {"w": [5, 8], "b": [8]})


@pytest.mark.parametrize(
    ("mesh", "smoothing"),
    [*((mesh, 0.2) for mesh in MESHES), ("data:2;model:2", 0.0)],
)
def test_loss_and_gradients_are_those_of_plain_tensorflow(mesh, smoothing):
    params = PARAMS.Copy().Set(label_smoothing=smoothing)
    run(params, [X, LABELS, WEIGHTS], mesh).assert_close(*plain(smoothing))


def test_weights_are_one_by_default():
    run(PARAMS, [X, LABELS], "data:2").assert_close(*plain(weights=np.ones([2, 3], np.float32)))


@pytest.mark.parametrize("mesh", ["model:1", "data:2;model:2"])
def test_weights_are_not_rounded_to_what_products_are_computed_in(mesh):
    """In bfloat16 a third and 257 were other numbers, and the loss was divided by their sum."""
    weights = np.array([[1 / 3, 257, 0], [1, 1, 2]], np.float32)
    params = PARAMS.Copy().Set(fprop_dtype=tf.bfloat16)
    found = run(params, [X, LABELS, weights], mesh)
    np.testing.assert_allclose(found.outputs[1], weights.sum(), rtol=1e-7)
    of_integers = run(params, [X, LABELS, np.array([[1, 300, 0], [1, 1, 2]])], mesh)
    assert of_integers.outputs[1] == 305


def test_large_logits_do_not_overflow():
    run(PARAMS, [X * 1000, LABELS, WEIGHTS], "model:2").assert_close(*plain(x=X * 1000), rtol=1e-3)


def test_no_device_has_all_logits():
    params = PARAMS.Copy().Set(vocab_size=1024)
    lowering = make_lowering("model:4")
    sizes = []

    def call(layer, theta, *args):
        outputs = layer.FProp(theta, *args)
        for operation in tf.compat.v1.get_default_graph().get_operations():
            sizes.extend(output.shape.num_elements() or 0 for output in operation.outputs)
        return outputs

    run(params, [X, LABELS], "model:4", call=call, calls=lowering)
    assert max(sizes) == 2 * 3 * 1024 / 4


@pytest.mark.parametrize("smoothing", [1.0, -0.1, None])
def test_a_smoothing_that_is_no_part_is_an_error(smoothing):
    with pytest.raises(PipelineError, match=r"label_smoothing is .* below 1"):
        PARAMS.Copy().Set(label_smoothing=smoothing).Instantiate()


def test_rules_for_other_layers_do_not_matter():
    with lowering_scope(make_lowering("data:2;model:2", RULES + ";columns:model")):
        assert PARAMS.Copy().Instantiate().weight_parts()["w_slice_1"].holders == (1, 3)
