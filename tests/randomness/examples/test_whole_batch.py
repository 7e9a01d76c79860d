"""In which order other dims are folded into the batch's is found out by what draws meet."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.randomness.examples.whole_batch import DrawsOfStage, labels_of_batch

BATCH, HEADS = 4, 3


def draws_of(stage):
    """What a stage draws, given a tensor [BATCH, HEADS]."""
    drawn = {}

    def run(x):
        with plan_free_randomness(tf.constant(3, tf.int64)) as noted, layer_scope("layer"):
            y = stage(x)
        drawn.update(noted)
        return y

    spec = tf.TensorSpec([BATCH, HEADS])
    graph = tf.function(run, autograph=False).get_concrete_function(spec).graph
    (x,) = graph.inputs
    labels = labels_of_batch([x], 0)
    return DrawsOfStage(graph, drawn, lambda: {x.name: labels[0]}, BATCH), graph


def noise(x):
    return x * tf.random.uniform([BATCH * HEADS])


def before(stage):
    draws, _ = draws_of(stage)
    (name,) = draws.whole.of
    return draws.whole.before(name, 0, HEADS)


def test_inputs_belong_to_the_examples_along_the_dim_that_is_cut():
    one, two = labels_of_batch([tf.zeros([2, 3]), tf.zeros([5, 4, 1])], 1)
    assert one.tolist() == [[0, 1, 2]] and two.tolist() == [[[0], [1], [2], [3]]]


def test_examples_may_come_first_or_last():
    assert before(lambda x: noise(tf.reshape(x, [-1]))) == 1
    assert before(lambda x: noise(tf.reshape(tf.transpose(x), [-1]))) == HEADS


def test_where_nothing_is_folded_nothing_is_asked():
    draws, _ = draws_of(lambda x: x * tf.random.uniform([BATCH, 1]))
    (name,) = draws.whole.of
    assert draws.whole.before(name, 0, 1) == 1


@pytest.mark.parametrize(
    ("stage", "reason"),
    [
        (lambda x: noise(tf.ones([BATCH * HEADS])), "nothing that is known to belong"),
        (
            lambda x: tf.roll(tf.random.uniform([BATCH * HEADS]), 1, 0) * tf.reshape(x, [-1]),
            "what a Roll operation does with them is not known",
        ),
        (
            lambda x: (lambda n: n * tf.reshape(x, [-1]) + n * tf.reshape(tf.transpose(x), [-1]))(
                tf.random.uniform([BATCH * HEADS])
            ),
            "in no order do they meet",
        ),
    ],
    ids=["nobody", "roll", "both"],
)
def test_what_cannot_be_found_out_is_an_error_that_says_why(stage, reason):
    with pytest.raises(PipelineError, match=rf"^layer 'layer' draws .*\(12,\).*{reason}.*dim of"):
        before(stage)


def test_outputs_have_the_labels_that_they_get_on_the_way():
    draws, graph = draws_of(lambda x: tf.transpose(x) + 1)
    (label,) = draws.labels(graph.outputs)
    np.testing.assert_array_equal(label, [np.arange(BATCH)])
