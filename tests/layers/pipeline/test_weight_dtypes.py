"""The dtypes that layers compute with, and their weights before they are cast to them."""

import types

import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils

from pipemesh.layers.pipeline.weight_dtypes import (
    cast_first,
    compute_dtypes,
    plain_theta,
    uncast_theta,
)


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


@pytest.fixture
def eager():
    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(False, test_mode=True)


def stack_of(layer, do_eval):
    return types.SimpleNamespace(children={"node": layer}, do_eval=do_eval)


def test_weights_of_some_stages_are_cast_as_their_layers_compute_with_them(eagerly):
    layer, other = make(), tf.constant(3.0)
    theta = py_utils.NestedMap(node=uncast_theta(layer), other=other)
    ready = plain_theta(stack_of(layer, do_eval=False), theta, ["node"])
    assert dtypes_of(ready.node) == compute_dtypes(layer).FlattenItems()
    assert ready.other is other and theta.node.low.w.dtype == tf.float32


@pytest.mark.parametrize("do_eval", [False, True])
def test_a_row_that_is_looked_up_twice_has_a_dense_gradient_where_somebody_trains(eagerly, do_eval):
    layer = make(None)
    with tf.GradientTape() as tape:
        theta = py_utils.NestedMap(node=uncast_theta(layer))
        tape.watch(theta.node.low.w)
        ready = plain_theta(stack_of(layer, do_eval), theta, ["node"])
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
