"""Dtypes of weights, their replicas, and shared weights."""

import collections
import types

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, optimizer, py_utils

from pipemesh.backend.saved_state import create_slots
from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers import SeqLayer
from pipemesh.layers.named import FeedForward
from pipemesh.layers.pipeline.weights import (
    cast_first,
    compute_dtypes,
    plain_theta,
    replica_of,
    spread_weights,
    uncast_theta,
    with_frozen,
)
from pipemesh.recurrent import Home
from tests.layers.blocks import blocks
from tests.layers.harness import as_tensor, cluster, executing, run_tf1, run_tf2
from tests.layers.pipeline.named_stacks import INPUTS, TIED, VOCAB, WIDTH, language
from tests.layers.stacks import equal_to_plain, first, stack_of


class Leaf(base_layer.BaseLayer):
    """Has a weight, and one of another dtype than its own."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        init = py_utils.WeightInit.Constant(1.1)
        self.CreateVariable("w", py_utils.WeightParams([3, 2], init))
        self.CreateVariable("count", py_utils.WeightParams([], init, tf.float64))


class Node(base_layer.BaseLayer):
    """Has two leaves, the second with a dtype of its own, and a list and a dict of others."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("low", Leaf.Params())
        self.CreateChild("own", Leaf.Params().Set(fprop_dtype=tf.float16))
        self.CreateChildren("many", [Leaf.Params()])
        self.CreateChildren("named", {"leaf": Leaf.Params()})


def make(dtype=tf.bfloat16):
    return Node.Params().Set(name="node", fprop_dtype=dtype).Instantiate()


def dtypes_of(structure):
    return [(name, value.dtype.base_dtype) for name, value in structure.FlattenItems()]


def test_weights_have_the_dtypes_of_their_variables_and_layers_compute_in_their_own(eagerly):
    layer = make()
    found = uncast_theta(layer)
    assert dtypes_of(found) == dtypes_of(layer.vars)
    tf.nest.assert_same_structure(found, layer.theta)
    found = compute_dtypes(layer)
    assert found.FlattenItems() == dtypes_of(layer.theta)
    assert (found.low.w, found.own.w, found.many[0].w) == (tf.bfloat16, tf.float16, tf.bfloat16)
    assert found.low.count == tf.float64
    assert compute_dtypes(make(None)).low.w == tf.float32


def test_weights_are_frozen_at_any_depth(eagerly):
    layer = make(None)
    stops = [layer.vars.named["leaf"].w, layer.vars.many[0].w, layer.vars.low.w]
    with tf.GradientTape() as tape:
        theta = with_frozen(layer, uncast_theta(layer), {v.ref() for v in stops})
        values = tf.nest.flatten(theta)
        total = tf.add_n([tf.reduce_sum(tf.cast(v, tf.float32)) for v in values])
    grads = tape.gradient(total, [*stops, layer.vars.own.w])
    assert [grad is None for grad in grads] == [True, True, True, False]


def test_weights_of_some_stages_are_cast_as_their_layers_compute_with_them(eagerly):
    layer, other = make(), tf.constant(3.0)
    stack = types.SimpleNamespace(children={"node": layer}, do_eval=False)
    theta = py_utils.NestedMap(node=uncast_theta(layer), other=other)
    ready = plain_theta(stack, theta, ["node"])
    assert dtypes_of(ready.node) == compute_dtypes(layer).FlattenItems()
    assert ready.other is other and theta.node.low.w.dtype == tf.float32


def test_the_first_argument_is_cast_if_it_is_a_floating_tensor():
    def cast(*args, nested_map_fprop=False):
        p = types.SimpleNamespace(fprop_dtype=tf.bfloat16, nested_map_fprop=nested_map_fprop)
        return cast_first(p, args)

    one = tf.constant(1.0)
    first, second = cast(one, one)
    assert first.dtype == tf.bfloat16 and second is one
    assert cast(1.5)[0].dtype == tf.bfloat16
    assert cast(tf.constant(1))[0].dtype == tf.int32
    assert cast() == () and cast(None, one) == (None, one)
    nested = py_utils.NestedMap(x=one)
    assert cast(nested, nested_map_fprop=True) == (nested,)


HOME = Home(("CPU:0", "CPU:1", "CPU:2", "CPU:3"), 2)


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
    # Where there is one replica, nothing moves.
    with spread_weights(Home(("CPU:0", "CPU:1"), 1)), tf.device("CPU:0"):
        variables = [tf.Variable(0.0) for _ in range(3)]
    assert {number(v.device) for v in variables} == {0}


@pytest.mark.parametrize("mesh", ["layers:2;data:2", "data:4;layers:2"])
def test_the_optimizers_state_is_spread_over_the_replicas_of_each_stage(eagerly, mesh):
    with cluster(mesh):
        layer = stack_of(blocks(8), [0, 4, 8], num_micro_batches=2).Instantiate()
        for name, home in zip(layer.stage_names, layer.StageHomes(), strict=True):
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


def tied_stack(bounds, schedule="gpipe"):
    return language(bounds, tied=TIED, lowering="placement", schedule=schedule)


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "schedule"),
    [
        (run_tf1, "layers:2", [0, 2, 4], "1f1b"),
        # Slices of different lengths on the replicas, which their devices join.
        (run_tf2, "layers:2;data:2;model:2 vocab:data;d_ff:model", [0, 2, 4], "1f1b"),
        # The first and the last stage lie on one home.
        (run_tf2, "layers:2;model:2,1 vocab:model", [0, 1, 2, 3, 4], "zb_v"),
    ],
)
def test_one_table_for_the_first_and_the_last_layer(run, mesh, bounds, schedule):
    params = tied_stack(bounds, schedule)
    found = equal_to_plain(run, params, INPUTS, mesh, steps=3, loss=first, rtol=2e-4, atol=2e-5)
    # It is one variable, with one entry in a checkpoint and one part in a norm.
    names = {name.partition("_slice")[0].partition("/var")[0] for name in found.weights}
    assert "named_embedding/table" in names and "named_head/w" not in names


def gradients_of(tied):
    """Returns gradients by the layer and name of each weight; an untied head starts equal."""
    table = np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    with executing(True):
        layer = language([0, 3], cls=SeqLayer, tied=tied).Instantiate()
        variables = {"/".join(v.name.split("/")[-3:-1]): v for v in layer.vars.Flatten()}
        for name, variable in variables.items():
            if name in ("named_embedding/table", "named_head/w"):
                variable.assign(table if "table" in name else table.T)
        with tf.GradientTape() as tape:
            loss = layer.FPropDefaultTheta(*map(as_tensor, INPUTS))[0]
        grads = tape.gradient(loss, list(variables.values()))
    return {n: tf.convert_to_tensor(g).numpy() for n, g in zip(variables, grads, strict=True)}


def test_the_gradient_is_the_sum_of_both_uses():
    tied, untied = gradients_of(TIED), gradients_of({})
    head = untied.pop("named_head/w")
    untied["named_embedding/table"] = untied["named_embedding/table"] + head.T
    assert tied.keys() == untied.keys()
    for name, grad in tied.items():
        np.testing.assert_allclose(grad, untied[name], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("tied", "error", "text"),
    [
        (["named_head.w"], PipelineError, r"is \['named_head.w'\]; it is a dict such as"),
        ({"named_head": "x.y"}, PipelineError, r"has 'named_head'; write the name of a layer, a"),
        ({"named_haed.w": "x.y"}, PipelineError, r"'named_haed', of which there are 0; did you"),
        ({"named_head.part.w": "x.y"}, PipelineError, r"has no part 'part' for 'part.w' to"),
        ({"named_head.v": "x.y"}, ShapeError, r"'named_head' has no weight 'v' to be given"),
        ({"named_head.w": "fc.w"}, PipelineError, r"'fc', a FCLayer, but only layers with named"),
        (
            {"named_head.w": "named_embedding.tabel"},
            ShapeError,
            r"'named_embedding' has no weight 'tabel' to share; did you mean 'table'",
        ),
        (
            {"named_head.w": "named_feed0.w_in"},
            ShapeError,
            r"has dims 'embed:4;vocab:11', but 'w_in' of layer 'named_feed0'.* 'embed:4;d_ff:8'",
        ),
        (
            {"named_head.w": "named_feed0.w_in", "named_feed0.w_in": "named_feed1.w_in"},
            PipelineError,
            r"which is given itself; name the one that is made: 'named_feed1.w_in'",
        ),
    ],
)
def test_what_cannot_be_tied_is_an_error(tied, error, text):
    params = language([0, 3], cls=SeqLayer, tied=tied)
    params.cell_tpl[0].sub += [
        layers.FCLayer.Params().Set(name="fc", input_dim=4, output_dim=4),
        *(FeedForward.Params().Set(name=f"named_feed{i}", input_dim=4, hidden_dim=8) for i in "01"),
    ]
    with tf.Graph().as_default() as graph:
        with pytest.raises(error, match=text), py_utils.VariableStore():
            params.Instantiate()
        # A misspelled layer is an error before anything is made.
        assert "of which" not in text or not graph.get_operations()


def test_a_layer_of_a_stage_with_a_prefix_is_tied_by_its_whole_name():
    """No name was right: one was unknown before layers were made, the other one afterwards."""
    params = language([0, 2, 3], cls=SeqLayer, tied={"own_named_head.w": "named_embedding.table"})
    params.cell_tpl[1].variable_name_prefix = "own_"
    with executing(True):
        names = [variable.name for variable in params.Instantiate().vars.Flatten()]
    assert any("named_embedding/table" in name for name in names)
    assert not any("named_head/w" in name for name in names)


def test_stages_that_cut_a_weight_in_different_ways_cannot_share_it():
    mesh = "layers:2;model:2,1 vocab:model"
    with cluster(mesh), pytest.raises(LayoutError, match=r"the mesh 'model:1', .*'model:2', so it"):
        tied_stack([0, 2, 4]).Instantiate()
