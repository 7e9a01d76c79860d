"""Dtypes of weights, their replicas, and shared weights."""

import collections
import functools
import types

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, optimizer, py_utils

from pipemesh.backend.saved_state import create_slots
from pipemesh.errors import LayoutError, PipelineError, ShapeError
from pipemesh.layers import PipeliningLayer, SeqLayer
from pipemesh.layers.named import Embedding, FeedForward, SoftmaxCrossEntropy
from pipemesh.layers.pipeline.weights import (
    cast_first,
    compute_dtypes,
    plain_theta,
    replica_of,
    spread_weights,
    uncast_theta,
)
from pipemesh.recurrent import Home
from tests.layers.blocks import blocks
from tests.layers.harness import cluster, initial_value, run_tf1, run_tf2
from tests.layers.pipeline.stacks import first, stack_of
from tests.pairwise import in_turn


class Leaf(base_layer.BaseLayer):
    """Has a weight, and one of another dtype than its own."""

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        init = py_utils.WeightInit.Constant(1.1)
        self.CreateVariable("w", py_utils.WeightParams([3, 2], init))
        self.CreateVariable("count", py_utils.WeightParams([], init, tf.float64))


class Node(base_layer.BaseLayer):
    """Has two leaves, the second with a dtype of its own, and a list of another."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("low", Leaf.Params())
        self.CreateChild("own", Leaf.Params().Set(fprop_dtype=tf.float16))
        self.CreateChildren("many", [Leaf.Params()])


def make(dtype=tf.bfloat16):
    return Node.Params().Set(name="node", fprop_dtype=dtype).Instantiate()


def dtypes_of(structure):
    return [(name, value.dtype.base_dtype) for name, value in structure.FlattenItems()]


def test_weights_have_the_dtype_of_their_variables_and_the_structure_of_theta(eagerly):
    layer = make()
    found = uncast_theta(layer)
    assert dtypes_of(found) == dtypes_of(layer.vars)
    tf.nest.assert_same_structure(found, layer.theta)


def test_each_weight_is_computed_with_in_the_dtype_of_its_layer(eagerly):
    layer = make()
    found = compute_dtypes(layer)
    assert found.FlattenItems() == dtypes_of(layer.theta)
    assert (found.low.w, found.own.w, found.many[0].w) == (tf.bfloat16, tf.float16, tf.bfloat16)
    assert found.low.count == tf.float64


def test_without_a_compute_dtype_it_is_that_of_the_variable(eagerly):
    assert compute_dtypes(make(None)).low.w == tf.float32


def holder(layer, do_eval):
    return types.SimpleNamespace(children={"node": layer}, do_eval=do_eval)


def test_weights_of_some_stages_are_cast_as_their_layers_compute_with_them(eagerly):
    layer, other = make(), tf.constant(3.0)
    theta = py_utils.NestedMap(node=uncast_theta(layer), other=other)
    ready = plain_theta(holder(layer, do_eval=False), theta, ["node"])
    assert dtypes_of(ready.node) == compute_dtypes(layer).FlattenItems()
    assert ready.other is other and theta.node.low.w.dtype == tf.float32


@pytest.mark.parametrize("do_eval", [False, True])
def test_a_row_that_is_looked_up_twice_has_a_dense_gradient_where_somebody_trains(eagerly, do_eval):
    layer = make(None)
    with tf.GradientTape() as tape:
        theta = py_utils.NestedMap(node=uncast_theta(layer))
        tape.watch(theta.node.low.w)
        ready = plain_theta(holder(layer, do_eval), theta, ["node"])
        rows = tf.gather(ready.node.low.w, [1, 1])
    grad = tape.gradient(rows, theta.node.low.w)
    assert isinstance(grad, tf.IndexedSlices) == do_eval
    assert tf.convert_to_tensor(grad).numpy().tolist() == [[0, 0], [2, 2], [0, 0]]


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


def test_where_there_is_one_replica_nothing_moves():
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


VOCAB, WIDTH = 12, 4
RNG = np.random.default_rng(0)
IDS = RNG.integers(0, VOCAB, [8, 6]).astype(np.int32)
LABELS = RNG.integers(0, VOCAB, [8, 6]).astype(np.int32)
TIED = {"named_head.w": "named_embedding.table"}


class Embed(Embedding):
    """Hands the labels through."""

    def FProp(self, theta, ids, labels):
        return super().FProp(theta, ids), labels


class Feed(FeedForward):
    """Hands the labels through."""

    def FProp(self, theta, x, labels):
        return super().FProp(theta, x), labels


class Head(SoftmaxCrossEntropy):
    def FProp(self, theta, x, labels):
        return super().FProp(theta, x, labels)[:2]


def stack(bounds, cls=PipeliningLayer, tied=TIED, **kwargs):
    feed = Feed.Params().Set(input_dim=WIDTH, hidden_dim=8, dropout_rate=0.2)
    params = [
        Embed.Params().Set(name="named_embedding", vocab_size=VOCAB, embedding_dim=WIDTH),
        *(feed.Copy().Set(name=f"named_feed{i}") for i in range(2)),
        Head.Params().Set(name="named_head", vocab_size=VOCAB, input_dim=WIDTH),
    ]
    return stack_of(params, bounds, cls, tied, loss_inside=True, **kwargs)


@functools.cache
def expected(run):
    """The plain stack's results, computed once for each mode."""
    return run(stack([0, 4], cls=SeqLayer), [IDS, LABELS], steps=3, loss=first)


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "schedule"),
    in_turn(
        [run_tf1, run_tf2],
        [
            ("layers:2", [0, 2, 4], "1f1b"),
            ("layers:2;data:2", [0, 2, 4], "zb_h1"),
            # The first and the last stage lie on one home.
            ("layers:2;model:2 vocab:model", [0, 1, 2, 3, 4], "zb_v"),
        ],
    ),
)
def test_one_table_for_the_first_and_the_last_layer(run, mesh, bounds, schedule):
    params = stack(bounds, num_micro_batches=2, schedule=schedule)
    found = run(params, [IDS, LABELS], steps=3, loss=first, num_devices=mesh)
    found.assert_close(expected(run), rtol=2e-4, atol=2e-5)
    # It is one variable, with one entry in a checkpoint and one part in a norm.
    names = {name.partition("_slice")[0].partition("/var")[0] for name in found.weights}
    assert "named_embedding/table" in names and "named_head/w" not in names


def gradients_of(tied):
    """Returns gradients by the layer and name of each weight; an untied head starts equal."""
    table = np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)
    with cluster(1, False):
        py_utils.GetOrCreateGlobalStepVar().assign(0)
        layer = stack([0, 4], cls=SeqLayer, tied=tied).Instantiate()
        variables = {"/".join(v.name.split("/")[-3:-1]): v for v in layer.vars.Flatten()}
        for name, variable in variables.items():
            if name in ("named_embedding/table", "named_head/w"):
                variable.assign(table if "table" in name else table.T)
            elif (value := initial_value(variable)) is not None:
                variable.assign(value)
        with tf.GradientTape() as tape:
            loss, _ = layer.FPropDefaultTheta(tf.constant(IDS), tf.constant(LABELS))
        grads = tape.gradient(loss, list(variables.values()))
    return {n: tf.convert_to_tensor(g).numpy() for n, g in zip(variables, grads, strict=True)}


def test_the_gradient_is_the_sum_of_both_uses(eagerly):
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
            r"has dims 'embed:4;vocab:12', but 'w_in' of layer 'named_feed0'.* 'embed:4;d_ff:8'",
        ),
        (
            {"named_head.w": "named_feed0.w_in", "named_feed0.w_in": "named_feed1.w_in"},
            PipelineError,
            r"which is given itself; name the one that is made: 'named_feed1.w_in'",
        ),
    ],
)
def test_what_cannot_be_tied_is_an_error(tied, error, text):
    params = stack([0, 4], cls=SeqLayer, tied=tied)
    fc = layers.FCLayer.Params().Set(name="fc", input_dim=4, output_dim=4)
    params.cell_tpl[0].sub.append(fc)
    with tf.Graph().as_default(), pytest.raises(error, match=text), py_utils.VariableStore():
        params.Instantiate()


def test_a_weight_is_shared_by_stages_that_cut_it_alike():
    mesh = "layers:2;model:2,1 vocab:model"
    with cluster(mesh), pytest.raises(LayoutError, match=r"the mesh 'model:1', .*'model:2', so it"):
        stack([0, 2, 4]).Instantiate()
    # A V has the first and the last stage on one home.
    params = stack([0, 1, 2, 3, 4], num_micro_batches=2, schedule="zb_v")
    found = run_tf2(params, [IDS, LABELS], steps=3, num_devices=mesh, loss=first)
    found.assert_close(expected(run_tf2), rtol=2e-4, atol=2e-5)
