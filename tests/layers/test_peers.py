"""Backbones of the package keras-hub train on split stages as Keras trains them."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from pipemesh.layers import (
    KerasLayer,
    PartitionSequentialLayers,
    PipeliningLayer,
    keras_layers,
)
from pipemesh.layers.feature_extraction import all_layers
from tests.layers.harness import executing

os.environ.setdefault("KAGGLEHUB_CACHE", os.path.join(os.getcwd(), "kaggle"))
models = pytest.importorskip("keras_hub", reason="keras-hub is among the extra 'peers'").models

MESH = "layers:2;model:2 "
SIZES = {"vocabulary_size": 50, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, 50, [4, 8]).astype(np.int32)
# Some rows are shorter.
MASK = (np.arange(8) < [[8], [8], [5], [6]]).astype(np.int32)


def gpt2():
    return models.GPT2Backbone(num_heads=4, max_sequence_length=8, dropout=0.0, **SIZES)


def llama():
    return models.LlamaBackbone(num_query_heads=4, num_key_value_heads=2, **SIZES)


def whole(layer, name):
    """A weight of a Keras layer, with all slices of it."""
    value = np.zeros(layer.named_shapes[name].sizes, np.float32)
    for part in layer.parts_of(name):
        where = zip(part.begin, part.sizes, strict=True)
        value[tuple(slice(begin, begin + size) for begin, size in where)] = layer.vars[part.name]
    return value


def weights_of(stack):
    """All weights by their paths in the Keras model."""
    return {
        variable.path: whole(layer, name)
        for layer in all_layers(stack)
        if isinstance(layer, KerasLayer)
        for name, variable in layer._kept.items()
    }


def train(compute, variables, steps=3):
    """Losses of some steps of gradient descent."""

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            y = compute()
            loss = tf.reduce_mean(
                tf.square(y - tf.cos(tf.reshape(tf.range(1024.0)[: 4 * 8 * 16], [4, 8, 16])))
            )
        for variable, grad in zip(variables, tape.gradient(loss, variables), strict=True):
            if grad is not None:
                variable.assign_sub(0.1 * tf.convert_to_tensor(grad))
        return loss

    return [float(step()) for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "layout"),
    [
        (gpt2, "heads:model;d_ff:model;vocab:model"),
        (llama, "heads:model;kv_heads:model;d_ff:model"),
    ],
    ids=["gpt2", "llama"],
)
def test_a_backbone_trains_as_in_keras(make, layout):
    keras.utils.set_random_seed(1)
    model = make()
    layers = keras_layers(model)
    specs = [tf.TensorSpec([2, 8], tf.int32)] * 2
    stages = PartitionSequentialLayers(layers, 2, *specs)
    # Half of the blocks on each.
    names = [[layer.layer.calls[0].operation.name for layer in stage.sub] for stage in stages]
    assert [sum("transformer" in name for name in of_stage) for of_stage in names] == [1, 1]
    inputs = [tf.constant({"token_ids": IDS, "padding_mask": MASK}[x.name]) for x in model.inputs]
    params = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages, num_micro_batches=2)
    with executing(True, MESH + layout):
        stack = params.Instantiate()
        variables = [v for v in stack.vars.Flatten() if v.trainable]
        split = [v.name for v in variables if "_slice_1" in v.name]
        losses = train(lambda: stack.FPropDefaultTheta(*inputs), variables)
        trained = weights_of(stack)
    # The model still has the weights that it began with.
    plain = [v.value for v in model.trainable_variables]
    wanted = train(lambda: model({"token_ids": IDS, "padding_mask": MASK}, training=True), plain)
    assert len(split) >= 12
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    for variable in model.weights:
        np.testing.assert_allclose(
            trained[variable.path], variable.numpy(), 1e-4, 1e-6, err_msg=variable.path
        )
