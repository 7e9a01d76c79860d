"""Random numbers that no scope has seen."""

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.escaped_draws import check_no_draw_escaped

STEP = tf.constant(3, tf.int64)


def check(function, num_microbatches=2):
    def stage():
        with plan_free_randomness(STEP):
            return function()

    graph = tf.function(stage, autograph=False).get_concrete_function().graph
    check_no_draw_escaped(graph, "s0", num_microbatches)


def stateful():
    return tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32)


def stateless():
    key, counter = tf.raw_ops.StatelessRandomGetKeyCounter(seed=[1, 2])
    return tf.raw_ops.StatelessRandomUniformV2(shape=[2], key=key, counter=counter, alg=1)


@tf.function(autograph=False)
def drawing():
    return tf.random.normal([2])


@pytest.mark.parametrize(
    "function",
    [
        lambda: tf.random.normal([2]),
        lambda: tf.random.stateless_uniform([2], [1, 2]),
        lambda: tf.nn.dropout(tf.ones([2]), 0.5),
        drawing,
        lambda: tf.cond(tf.constant(True), lambda: tf.random.normal([2]), lambda: tf.zeros([2])),
        lambda: tf.sin(1.0),
    ],
)
def test_draws_that_a_scope_sees_are_those_of_the_plan(function):
    check(function)


def test_a_raw_draw_is_an_error_that_says_what_to_call():
    with pytest.raises(
        PipelineError, match=r"^stage 's0' .* RandomStandardNormal .* would be others .*tf\.raw_ops"
    ):
        check(stateful, num_microbatches=1)
    with pytest.raises(
        PipelineError, match=r"StatelessRandomUniformV2 .* the same for every microbatch.*raw_ops"
    ):
        check(stateless)


def test_a_draw_without_state_is_right_for_a_single_microbatch():
    check(stateless, num_microbatches=1)


def test_a_function_that_was_traced_before_is_named():
    concrete = drawing.get_concrete_function()
    with pytest.raises(PipelineError, match=r"in the function '.*drawing.*', which was .*outside"):
        check(concrete)
