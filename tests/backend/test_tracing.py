"""Graphs of functions while they are traced."""

import pytest
import tensorflow as tf

from pipemesh.backend.tracing import (
    drop_unused_captures,
    is_in_old_loop,
    loop_counter,
    reads_replaced,
)


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
def test_loops_of_tf1s_old_kind_are_told_from_new_ones(old):
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


def test_reads_of_outer_variables_are_replaced_and_their_handles_forgotten():
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


def test_reads_are_replaced_only_inside_and_only_in_the_graph_itself():
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


def test_captures_that_nobody_named_or_that_are_used_stay():
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
