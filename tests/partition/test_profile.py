"""Measured costs: what can be known exactly is exact, and what takes longer costs more."""

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import partition, profile_costs

tf = pytest.importorskip("tensorflow")


def test_bytes_are_counted_and_times_are_measured():
    layers = [
        tf.keras.layers.Dense(64, name="small"),
        tf.keras.layers.Dense(2048, activation="relu", name="large"),
        lambda x: tf.reduce_mean(x, axis=1, keepdims=True),
    ]
    names = ["small", "large", "mean"]
    measured = profile_costs(layers, tf.ones([128, 32]), repeats=5, names=names)
    assert [cost.parameter_bytes for cost in measured] == [
        4 * (32 * 64 + 64),
        4 * (64 * 2048 + 2048),
        0,
    ]
    assert [cost.boundary_bytes for cost in measured] == [4 * 128 * 64, 4 * 128 * 2048, 4 * 128]
    # A dense layer keeps its input; one with a ReLU also its output.
    assert measured[0].activation_bytes == 4 * 128 * 32
    assert measured[1].activation_bytes == 4 * 128 * (64 + 2048)
    assert measured[1].total > 0
    assert all(cost.forward_spread >= 0 and cost.backward_spread >= 0 for cost in measured)
    assert partition(measured, 2).layer_names == ("small", "large", "mean")


def test_integer_inputs_and_layers_without_weights():
    layers = [tf.keras.layers.Embedding(10, 4), tf.nn.relu]
    costs = profile_costs(layers, tf.constant([[1, 2, 3]]), repeats=2)
    assert costs[0].parameter_bytes == 160
    assert costs[1].name == "relu"


def test_several_inputs_and_outputs():
    def swap(a, b):
        return b, a

    costs = profile_costs([swap, swap], (tf.ones([2]), tf.ones([3])), repeats=2)
    assert [cost.boundary_bytes for cost in costs] == [20, 20]


def test_errors():
    with pytest.raises(PartitionError, match="callables is empty"):
        profile_costs([], 1.0)
    with pytest.raises(PartitionError, match="must be 1 or more"):
        profile_costs([tf.nn.relu], 1.0, repeats=0)
    with pytest.raises(PartitionError, match="2 entries for 1 callables"):
        profile_costs([tf.nn.relu], 1.0, names=["a", "b"])
    with pytest.raises(PartitionError, match=r"layer 0 .* returned no tensors"):
        profile_costs([lambda x: None], 1.0)


def test_lingvo_layers():
    pytest.importorskip("pipemesh.layers")
    py_utils = pytest.importorskip("lingvo.core.py_utils")
    from lingvo.core import layers

    eager = py_utils.IsEagerMode()
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        params = layers.ProjectionLayer.Params().Set(
            name="projection", input_dim=8, output_dim=16, batch_norm=False
        )
        (cost,) = profile_costs([params.Instantiate()], tf.ones([4, 8]), repeats=2)
    finally:
        py_utils.SetEagerMode(eager, test_mode=True)
    assert cost.name == "projection"
    assert cost.parameter_bytes == 4 * (8 * 16)
    assert cost.boundary_bytes == 4 * 4 * 16
