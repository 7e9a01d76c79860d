"""Random numbers inside of a pipeline are those of the whole batch."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ShapeError
from pipemesh.lowering import ops
from pipemesh.lowering.placement import PlacementLowering
from pipemesh.mesh import Dim, LayoutRules, Mesh
from pipemesh.recurrent.circular.layer_position import LayerPosition, layer_seed

MESH = Mesh.from_text("layers:2;data:2;model:2")
SEED = tf.constant([3, 1])


def make():
    """Both stages at another layer and microbatch."""
    rules = LayoutRules.from_text("batch:data;heads:model")
    lowering = PlacementLowering(MESH, rules, [f"CPU:{i}" for i in range(8)])
    stages = lowering.coordinate("layers")
    layers = lowering.raw_map(lambda stage: stage + 4, stages)
    microbatches = lowering.raw_map(lambda stage: 2 - stage, stages)
    return LayerPosition(lowering, layers, microbatches, Dim("batch", 24), 6)


def rows_of(processor):
    """What of the batch: each half of it, with four parts of three rows, is another core's."""
    at = MESH.coordinates(processor)
    first = 12 * at["data"] + 3 * (2 - at["layers"])
    return slice(first, first + 3)


@pytest.mark.parametrize("dims", ["batch:6;heads:4;io:3", "io:3;batch:6;heads:4", "heads:4;io:3"])
def test_each_processor_draws_its_rows_of_what_its_layer_draws_for_the_whole_batch(dims):
    drawn = make().random_uniform(dims, seed=SEED)
    sizes = [24 if d.name == "batch" else d.size for d in drawn.shape]
    for i, part in enumerate(drawn.slices):
        at = MESH.coordinates(i)
        seed = layer_seed(SEED, 4 + at["layers"])
        whole = tf.random.stateless_uniform(sizes, seed, alg="philox").numpy()
        heads = slice(2 * at["model"], 2 * at["model"] + 2)
        held = {"batch": rows_of(i), "heads": heads, "io": slice(None)}
        np.testing.assert_array_equal(part, whole[tuple(held[d.name] for d in drawn.shape)])


def test_normal_numbers_are_those_of_the_layer_and_its_row_of_seeds():
    rows = tf.constant([[3, number] for number in (7, 1, 9, 2, 8, 5)], tf.int64)
    for seeds, seed_of in ((SEED, lambda layer: layer_seed(SEED, layer)), (rows, rows.__getitem__)):
        drawn = make().random_normal("batch:6;io:3", seed=seeds)
        for processor, layer in ((0, 4), (7, 5)):
            whole = tf.random.stateless_normal([24, 3], seed_of(layer), alg="philox")
            np.testing.assert_array_equal(drawn.slices[processor], whole[rows_of(processor)])


def test_seeds_of_layers_and_draws_all_differ():
    seeds = {
        tuple(layer_seed(tf.constant([step, draw]), layer).numpy())
        for step in range(3)
        for draw in range(10)
        for layer in range(10)
    }
    assert len(seeds) == 300


def test_a_batch_dim_of_another_size_and_a_rate_that_is_no_probability_are_errors():
    with pytest.raises(ShapeError, match="size 6 of a microbatch"):
        make().random_uniform("batch:24;io:3", seed=SEED)
    position = make()
    x = ops.import_tensor(position.lowering, tf.ones([6]), "batch:6")
    assert position.dropout(x, rate=0, seed=SEED) is x
    for rate in (-0.1, 1.0):
        with pytest.raises(ShapeError, match="probability of being dropped"):
            position.dropout(x, rate=rate, seed=SEED)
