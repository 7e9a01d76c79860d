"""Keras layers whose weights a layout splits equal themselves on one device."""

import keras
import numpy as np

from pipemesh.layers import KerasLayer
from tests.layers.harness import run_tf2
from tests.layers.stacks import equal_to_plain, stack_of

RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4, 8]).astype(np.float32)


def wrapped(name, layer, shapes=((None, 4, 8),), **params):
    # Values of weights with "named" in their names are those that Keras draws.
    params = {"random_seed": 1, **params}
    return KerasLayer.Params().Set(
        name=f"named_{name}", layer=layer, input_shapes=[*shapes], **params
    )


def mlp():
    return keras.Sequential(
        [keras.layers.Dense(16, activation="gelu"), keras.layers.Dense(8, activation="tanh")]
    )


def test_dense_layers_are_split():
    params = stack_of([wrapped(f"mlp{i}", mlp) for i in range(2)], [0, 1, 2], num_micro_batches=2)
    mesh = "layers:2;model:2 d_ff:model"
    equal_to_plain(run_tf2, params, [X], mesh, steps=2, rtol=2e-4, atol=2e-5)
