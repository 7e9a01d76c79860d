"""Sums that round alike wherever their addends come from."""

import numpy as np
import tensorflow as tf

from pipemesh.backend.sums import sum_in_order
from pipemesh.recurrent.watch.placement import record_placement

# The sum of these from left to right is 1, from right to left 0.
FIRST, SECOND, THIRD = 1e8, -1e8, 1.0


def value(sum_of, *given):
    """What a graph finds whose last addend alone is nobody else's, and may be overwritten."""

    @tf.function
    def added(first, second, third):
        return sum_of([first, second, tf.sqrt(third)])

    return float(added(*map(tf.constant, given)))


def test_tensorflows_own_sum_depends_on_whose_memory_is_free():
    """If this fails, TensorFlow adds in order, and `sum_in_order` may go."""
    assert value(tf.add_n, FIRST, SECOND, THIRD) == 0


def test_it_adds_from_the_first_to_the_last():
    assert value(sum_in_order, FIRST, SECOND, THIRD) == 1
    assert float(sum_in_order([tf.constant(x) for x in (FIRST, SECOND, THIRD)])) == 1


def test_one_tensor_is_its_own_sum():
    x = tf.constant([3.0])
    assert sum_in_order([x]) is x


def test_additions_before_it_are_not_merged_with_it():
    def total(*given):
        a, b, c, d = map(tf.sqrt, given)
        return sum_in_order([tf.add_n([a, b, c]), d])

    given = [tf.constant([4.0, 9.0])] * 4
    with record_placement() as graphs:
        tf.function(total)(*given)
    nodes = [node for graph in graphs.partition_graphs for node in graph.node]
    assert sorted(node.attr["N"].i for node in nodes if node.op == "AddN") == [2, 3]


def test_gradients_flow_to_each():
    xs = [tf.constant([1.0, 2.0]), tf.constant([3.0, 4.0]), tf.constant([5.0, 6.0])]

    @tf.function
    def grads(*given):
        with tf.GradientTape() as tape:
            tape.watch(given)
            total = tf.reduce_sum(tf.square(sum_in_order(given)))
        return tape.gradient(total, given)

    for found in grads(*xs):
        np.testing.assert_array_equal(found, [18.0, 24.0])
