"""The functions that operations call."""

import gc
import weakref

import pytest
import tensorflow as tf

from pipemesh.backend.functions import (
    Bodies,
    called_functions,
    keep_alive,
    operations_within,
    surrounding_graphs,
)


@tf.function
def inner(x):
    return tf.sin(x)


@tf.function
def outer(x):
    return tf.cond(x > 0, lambda: inner(x), lambda: inner(tf.exp(x)))


@pytest.fixture(scope="module")
def graph():
    return outer.get_concrete_function(tf.TensorSpec([])).graph


def test_a_branch_calls_two_functions_and_a_sum_none(graph):
    (branch,) = [op for op in graph.get_operations() if op.type in ("If", "StatelessIf")]
    first, second = called_functions(graph, branch)
    assert "Exp" not in {op.type for op in first.get_operations()}
    assert "Exp" in {op.type for op in second.get_operations()}
    others = [op for op in graph.get_operations() if op is not branch]
    assert not [found for op in others for found in called_functions(graph, op)]


def test_operations_are_found_behind_the_names_of_their_functions(graph):
    found = [inside for inside, op in operations_within(graph) if op.type == "Sin"]
    assert len(found) == 2 and all(inside[-1] == "inner" and len(inside) == 2 for inside in found)


def test_nodes_are_found_in_each_function_once(graph):
    definition = graph.as_graph_def()
    kinds = [node.op for node in Bodies(definition).within(definition.node)]
    functions = {f.signature.name for f in definition.library.function}
    sines = sum("inner" in name and "inference" in name for name in functions)
    assert kinds.count("Sin") == sines >= 1 and kinds.count("Exp") == 1
    assert {len(Bodies(definition).called(node)) for node in definition.node} == {0, 2}


def test_a_node_may_be_the_call_of_a_function_of_its_own_name():
    definition = tf.compat.v1.GraphDef()
    function = definition.library.function.add()
    function.signature.name = "mine"
    function.node_def.add(name="inside", op="NoOp")
    node = definition.node.add(name="call", op="mine")
    assert [found.name for found in Bodies(definition).within([node])] == ["call", "inside"]


def test_a_graph_is_surrounded_by_those_that_it_is_traced_in():
    seen = []

    @tf.function
    def around(x):
        return tf.cond(x > 0, lambda: seen.append(tf.constant(1).graph) or x, lambda: x)

    found = around.get_concrete_function(tf.TensorSpec([]))
    assert list(surrounding_graphs(seen[0]))[:2] == [seen[0], found.graph]


def test_what_is_kept_lives_as_long_as_the_outermost_function_and_no_longer():
    class Thing:
        pass

    refs = []

    def make():
        @tf.function
        def around(x):
            @tf.function
            def within(y):
                thing = Thing()
                refs.append(weakref.ref(thing))
                keep_alive(thing)
                return y

            return within(x)

        return around.get_concrete_function(tf.TensorSpec([]))

    function = make()
    gc.collect()
    assert refs[0]() is not None
    del function
    gc.collect()
    assert refs[0]() is None


def test_nothing_is_kept_where_there_is_no_function():
    thing = weakref.WeakSet()
    keep_alive(thing)
    ref = weakref.ref(thing)
    del thing
    gc.collect()
    assert ref() is None
