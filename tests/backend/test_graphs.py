"""Graphs of functions, while they are traced and as they are executed."""

import gc
import weakref

import pytest
import tensorflow as tf
from tensorflow.python.eager import context

from pipemesh.backend.graphs import (
    Bodies,
    called_functions,
    drop_unused_captures,
    is_in_old_loop,
    keep_alive,
    loop_counter,
    operations_within,
    reads_replaced,
    record_placement,
    registered_kernels,
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


def test_operations_come_with_the_names_of_their_functions(graph):
    found = [inside for inside, op in operations_within(graph) if op.type == "Sin"]
    assert len(found) == 2 and all(inside[-1] == "inner" and len(inside) == 2 for inside in found)


def test_nodes_are_found_in_each_function_once(graph):
    definition = graph.as_graph_def()
    kinds = [node.op for node in Bodies(definition).within(definition.node)]
    functions = {f.signature.name for f in definition.library.function}
    sines = sum("inner" in name and "inference" in name for name in functions)
    assert kinds.count("Sin") == sines >= 1 and kinds.count("Exp") == 1
    assert {len(Bodies(definition).called(node)) for node in definition.node} == {0, 2}
    # A node may have the kind of a function's name.
    definition = tf.compat.v1.GraphDef()
    function = definition.library.function.add()
    function.signature.name = "mine"
    function.node_def.add(name="inside", op="NoOp")
    node = definition.node.add(name="call", op="mine")
    assert [found.name for found in Bodies(definition).within([node])] == ["call", "inside"]


def test_surrounding_graphs_are_found_up_to_the_outermost():
    seen = []

    @tf.function
    def around(x):
        return tf.cond(x > 0, lambda: seen.append(tf.constant(1).graph) or x, lambda: x)

    found = around.get_concrete_function(tf.TensorSpec([]))
    assert list(surrounding_graphs(seen[0]))[:2] == [seen[0], found.graph]


def test_kept_objects_live_as_long_as_the_outermost_function():
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
    thing = Thing()
    keep_alive(thing)  # In no function.
    refs.append(weakref.ref(thing))
    del thing
    gc.collect()
    assert refs[0]() is not None and refs[1]() is None
    del function
    gc.collect()
    assert refs[0]() is None


def test_a_loop_counts_its_turns():
    @tf.function
    def run():
        def body(i, sum):
            graph = tf.compat.v1.get_default_graph()
            return i + 10, sum + 100 * loop_counter(graph)

        def go_on(i, sum):
            assert loop_counter(tf.compat.v1.get_default_graph()) is not None
            return i < 50

        assert loop_counter(tf.compat.v1.get_default_graph()) is None
        return tf.while_loop(go_on, body, (20, 0))[1]

    # Turns 0, 1 and 2, whatever the loop itself counts.
    assert run().numpy() == 300
    assert loop_counter(tf.Graph()) is None


@pytest.mark.parametrize("old", [True, False])
def test_old_loops_of_tf1_are_distinguished_from_new_ones(old):
    seen = []

    def body(i):
        seen.append(is_in_old_loop())
        return i + 1

    control_flow = tf.compat.v1.control_flow_v2_enabled()
    switch = tf.compat.v1.disable_control_flow_v2 if old else tf.compat.v1.enable_control_flow_v2
    try:
        switch()
        with tf.Graph().as_default():
            assert not is_in_old_loop()
            tf.while_loop(lambda i: i < 3, body, [0])
            tf.cond(tf.constant(True), lambda: body(0), lambda: body(1))
    finally:
        if control_flow:
            tf.compat.v1.enable_control_flow_v2()
    assert seen == [old, False, False]


def test_reads_are_replaced_and_unused_handles_dropped():
    variable, kept = tf.Variable(2.0), tf.Variable(5.0)
    other, asked = tf.constant(7.0), []

    def replace(handle, dtype):
        asked.append((handle is variable.handle, dtype))
        return other

    @tf.function
    def run():
        graph = tf.compat.v1.get_default_graph()
        with reads_replaced(replace):
            inside = variable * 1
        kept.read_value()
        assert len(graph.captures) == 3
        drop_unused_captures(graph, {id(variable.handle), id(kept.handle)})
        outer = [outer for outer, _ in graph.captures]
        assert [tensor is other or tensor is kept.handle for tensor in outer] == [True, True]
        return inside, kept * 1

    assert [value.numpy() for value in run()] == [7, 5]
    assert asked == [(True, tf.float32)]


def test_reads_are_replaced_only_inside_and_in_this_graph():
    variable = tf.Variable(2.0)

    @tf.function
    def run(flag):
        with pytest.raises(ValueError, match="mine"), reads_replaced(lambda *_: tf.constant(7.0)):
            raise ValueError("mine")
        outside = variable * 1
        with reads_replaced(lambda *_: 1 / 0):
            branch = tf.cond(flag, lambda: variable * 10, lambda: variable * 20)
        return outside, branch

    assert [value.numpy() for value in run(tf.constant(True))] == [2, 20]


def test_unnamed_and_used_captures_stay():
    used, unused, unnamed = (tf.constant([value]) for value in (1.0, 2.0, 3.0))

    @tf.function
    def run():
        graph = tf.compat.v1.get_default_graph()
        for tensor in (used, unused, unnamed):
            graph.capture(tensor)
        result = used + 1
        drop_unused_captures(graph, {id(used), id(unused)})
        left = [outer for outer, _ in graph.captures]
        assert [any(tensor is outer for outer in left) for tensor in (used, unused, unnamed)] == [
            True,
            False,
            True,
        ]
        return result

    assert run.get_concrete_function()().numpy() == 2


def kinds(metadata):
    return {
        node.op
        for functions in metadata.function_graphs
        for graph in functions.partition_graphs
        for node in graph.node
    }


def test_graphs_of_first_runs_inside_are_collected():
    before, inside = tf.function(tf.tan), tf.function(tf.atan)
    x = tf.random.stateless_uniform([2], [1, 2])
    context.context().enable_graph_collection()
    before(x)
    with record_placement() as metadata:
        before(x)
        inside(x)
        assert not metadata.function_graphs, "it is filled when the context ends"
    assert "Atan" in kinds(metadata) and "Tan" not in kinds(metadata)


def test_a_graph_whose_first_run_fails_is_collected_and_none_afterwards():
    x = tf.random.stateless_uniform([2], [1, 2])

    @tf.function
    def failing(x):
        with tf.control_dependencies([tf.debugging.assert_greater(x, 2.0)]):
            return tf.atan(x)

    with pytest.raises(tf.errors.InvalidArgumentError), record_placement() as metadata:
        failing(x)
    assert "Atan" in kinds(metadata)
    tf.function(tf.sinh)(x)
    assert not kinds(context.context().export_run_metadata())


def test_registered_kernels_have_devices():
    assert "CPU" in {kernel.device_type for kernel in registered_kernels("MatMul")}
    assert {kernel.op for kernel in registered_kernels("MatMul")} == {"MatMul"}
    assert registered_kernels("NoSuchOperation") == []
