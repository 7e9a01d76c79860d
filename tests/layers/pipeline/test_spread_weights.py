"""Weights that all replicas of a stage have lie spread over them, and so does their optimizer."""

import collections
import contextlib

import pytest
import tensorflow as tf
from lingvo.core import optimizer, py_utils

from pipemesh.backend.saved_state import create_slots
from pipemesh.layers import mesh_cluster
from pipemesh.layers.pipeline.weights import replica_of, spread_weights
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent import Home
from tests.layers.blocks import blocks
from tests.layers.pipeline.test_pipelining import cut, pipelined
from tests.layers.pipeline.test_stage import stack

HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), 2)


@contextlib.contextmanager
def made(params, mesh, layout):
    """A layer, made eagerly on a mesh."""
    py_utils.SetEagerMode(True, test_mode=True)
    try:
        with mesh_cluster(Mesh.from_text(mesh), layout=LayoutRules.from_text(layout)):
            yield params.Instantiate()
    finally:
        py_utils.SetEagerMode(False, test_mode=True)


def number(name):
    return int(name[-1])


def test_each_variable_goes_where_the_fewest_bytes_lie():
    with spread_weights(HOME):
        with tf.device("CPU:0"):
            first = [tf.Variable(tf.zeros([size])) for size in (6, 1, 2, 5)]
        with tf.device("CPU:1"):
            second = [tf.Variable(tf.zeros([size])) for size in (1, 1)]
        with tf.device("CPU:7"):
            elsewhere = tf.Variable(0.0)
    assert [number(v.device) for v in first] == [0, 2, 2, 2]
    assert [number(v.device) for v in second] == [1, 3]
    assert number(elsewhere.device) == 7
    assert [replica_of(v, HOME) for v in [*first, *second, elsewhere, None]] == [
        *[0, 1, 1, 1],
        *[0, 1],
        *[0, 0],
    ]


def test_where_there_is_one_replica_nothing_moves():
    with spread_weights(Home(("CPU:0", "CPU:1"), 1)), tf.device("CPU:0"):
        variables = [tf.Variable(0.0) for _ in range(3)]
    assert {number(v.device) for v in variables} == {0}


@pytest.mark.parametrize("mesh", ["layers:2;data:2", "data:4;layers:2"])
def test_the_optimizers_state_is_spread_over_the_replicas_of_each_stage(mesh):
    with made(pipelined(cut(blocks(8), 2), 2), mesh, "batch:data") as layer:
        for name, home in zip(("stage0", "stage1"), layer.StageHomes(), strict=True):
            variables = layer.children[name].vars.Flatten()
            adam = optimizer.Adam.ParamsB().Set(name="adam").Instantiate().GetOptimizer(0.1)
            create_slots(adam, variables)
            held = collections.Counter()
            for variable in variables:
                for slot in ("m", "v"):
                    state = adam.get_slot(variable, slot)
                    assert state.device == variable.device
                    held[number(state.device)] += state.shape.num_elements()
            assert held.keys() == set(map(number, home.devices))
            largest = max(2 * v.shape.num_elements() for v in variables)
            assert max(held.values()) - min(held.values()) <= largest


def test_slices_keep_their_place_among_the_devices_of_a_replica():
    layout = "batch:data;d_ff:model"
    with made(stack(2, 2), "layers:2;data:2;model:2", layout) as layer:
        where = collections.defaultdict(set)
        for stage, home in enumerate(layer.StageHomes()):
            for variable in layer.children[f"s{stage}"].vars.Flatten():
                place = [*map(number, home.devices)].index(number(variable.device))
                kind = "first" if "slice_0" in variable.name else "second"
                where[kind if "slice" in variable.name else "whole"].add(place)
    # Devices 0 and 1 of a home are its first replica, 2 and 3 its second one.
    assert where["first"] <= {0, 2} and where["second"] <= {1, 3} and where["whole"] <= {0, 2}
    assert set().union(*where.values()) == {0, 1, 2, 3}
