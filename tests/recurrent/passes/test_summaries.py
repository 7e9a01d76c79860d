"""Summaries of TF1 graphs that a function makes come out of it merged."""

import tensorflow as tf

from pipemesh.recurrent.passes.summaries import Summaries

KEY = tf.compat.v1.GraphKeys.SUMMARIES


def traced(body):
    """What `body` returns while a function is traced in the current graph."""
    found = []

    def run():
        found.append(body())
        return tf.constant(0)

    tf.function(run, autograph=False).get_concrete_function()
    return found[0]


def scalars(*values, collections=None):
    for i, value in enumerate(values):
        tf.compat.v1.summary.scalar(f"s{i}", tf.constant(float(value)), collections)


def test_where_there_are_none_there_is_nothing_to_carry():
    with tf.Graph().as_default():
        assert traced(lambda: Summaries.found(0, None)) is None


def test_in_a_function_of_tf2_nobody_collects_them():
    found = []

    def body():
        tf.raw_ops.ScalarSummary(tags="s", values=1.0)
        return Summaries.found(0, None)

    @tf.function(autograph=False)
    def outer():
        found.append(traced(body))

    outer.get_concrete_function()
    assert found == [None]
    with tf.Graph().as_default():
        assert traced(body) is not None


def test_those_before_the_first_operation_are_not_looked_at():
    def body():
        scalars(1)
        return Summaries.found(len(tf.compat.v1.get_default_graph().get_operations()), None)

    with tf.Graph().as_default():
        assert traced(body) is None


def test_the_first_ones_are_merged_with_a_placeholder():
    def body():
        scalars(1, 2)
        return Summaries.found(0, None)

    with tf.Graph().as_default():
        found = traced(body)
    assert found.before.op.type == "Placeholder" and found.before.dtype == tf.string
    assert found.after.op.type == "MergeSummary"
    merged, *made = found.after.op.inputs
    assert merged is found.before
    assert [t.op.type for t in made] == ["ScalarSummary"] * 2
    assert found.collections == [KEY]


def test_later_ones_are_merged_with_the_earlier():
    def body():
        scalars(1)
        first = Summaries.found(0, None)
        begin = len(tf.compat.v1.get_default_graph().get_operations())
        scalars(2)
        return first, Summaries.found(begin, first)

    with tf.Graph().as_default():
        first, second = traced(body)
    assert second.before.op.type == "Identity" and second.before.op.inputs[0] is first.after
    assert len(second.after.op.inputs) == 2


def test_they_end_where_the_graph_would_have_collected_them():
    def body():
        scalars(1, collections=["mine"])
        return Summaries.found(0, None)

    with tf.Graph().as_default():
        found = traced(body)
        merged = tf.constant(b"")
        found.collect(merged)
        assert tf.compat.v1.get_collection("mine") == [merged]
        assert tf.compat.v1.get_collection(KEY) == []
