"""Names of stages and layers survive in the names of nodes."""

import pytest
import tensorflow as tf

from pipemesh.backend.labels import label, label_scope, labelled
from pipemesh.randomness import layer_scope, plan_free_randomness


@pytest.mark.parametrize("name", ["block3", "block#1", "a/b-c.d e", "Schicht-ä", "", "-2d-"])
def test_any_name_comes_back_from_the_name_of_a_node(name):
    node = f"action_1F0/{label('layer', name)}/MatMul"
    assert labelled("layer", node) == name
    assert labelled("stage", node) is None


def test_a_layer_that_is_entered_twice_keeps_its_name():
    with tf.Graph().as_default() as graph, tf.name_scope("outer"), label_scope("stage", "s"):
        for _ in range(2):
            with plan_free_randomness(None), layer_scope("block"), layer_scope("inner"):
                tf.zeros([])
    names = [op.name for op in graph.get_operations()]
    assert names == ["outer/stage.s/layer.block/zeros", "outer/stage.s/layer.block/zeros_1"]
    assert {labelled("layer", name) for name in names} == {"block"}
    assert {labelled("stage", name) for name in names} == {"s"}
