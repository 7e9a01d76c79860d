"""Whoever draws in a stage, and in whatever shape, the numbers are those of the plain model."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.randomness import layer_scope, plan_free_randomness
from pipemesh.recurrent import Options, Stage, pipeline
from pipemesh.schedule import gpipe
from tests.devices import device_name
from tests.recurrent.gradients import assert_same, with_gradients

pytestmark = pytest.mark.gpu

BATCH, TIME, WIDTH, HEADS = 8, 3, 4, 2
STEP = tf.constant(3, tf.int64)
RNG = np.random.default_rng(0)
WEIGHT = tf.constant(RNG.normal(size=[WIDTH, WIDTH]).astype(np.float32))
BATCH_FIRST = tf.constant(RNG.normal(size=[BATCH, TIME, WIDTH]).astype(np.float32))
TIME_FIRST = tf.constant(RNG.normal(size=[TIME, BATCH, WIDTH]).astype(np.float32))


def layer(function, number, weight, x):
    with layer_scope(f"layer{number}"):
        return x + function(tf.einsum("abi,ij->abj", x, weight))


def plain(function, x, weight):
    with plan_free_randomness(STEP):
        for number in range(2):
            x = layer(function, number, weight, x)
    return [x]


def pipelined(function, x, weight, num_microbatches, **options):
    def stage(number):
        def forward(theta, carry, inputs, microbatch, step):
            return [layer(function, number, theta[0], inputs[0])], []

        return Stage(f"stage{number}", forward, [weight], [], device_name(number))

    stages, schedule = [stage(0), stage(1)], gpipe(2, num_microbatches)
    return pipeline(stages, [x], schedule, step=STEP, options=Options(**options))[0]


def check(function, x, num_microbatches=4, **options):
    want = with_gradients(lambda x, w: plain(function, x, w), x, WEIGHT)
    got = with_gradients(
        lambda x, w: pipelined(function, x, w, num_microbatches, **options), x, WEIGHT
    )
    assert_same(got, want)
    return want


# Functions that are traced elsewhere.


@tf.function
def drop(x):
    return tf.nn.dropout(x, 0.5)


@tf.function
def drop_with_a_seed(x):
    return tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])


@tf.function
def drop_twice(x):
    return drop(x) + drop(2 * x)


class MakesItsVariable(tf.Module):
    """Is traced twice at its first call, once to make the variable."""

    def __init__(self):
        super().__init__()
        self.scale = None

    @tf.function
    def __call__(self, x):
        if self.scale is None:
            self.scale = tf.Variable(2.0)
        return tf.nn.dropout(x, 0.5) * tf.stop_gradient(self.scale)


makes_its_variable = MakesItsVariable()


def draws_of_functions(x):
    return drop_with_a_seed(x) + drop_twice(x) + makes_its_variable(x)


def test_functions_traced_before_draw_like_the_plain_model():
    # Outside of all pipelines, and with the shape of a microbatch: the trace could be found again.
    draws_of_functions(tf.ones([BATCH, TIME, WIDTH]))
    draws_of_functions(tf.ones([BATCH // 4, TIME, WIDTH]))
    assert_eager_equals(draws_of_functions, check(draws_of_functions, BATCH_FIRST))


def assert_eager_equals(function, want):
    found = with_gradients(lambda *args: plain(function, *args), BATCH_FIRST, WEIGHT, eagerly=True)
    assert_same(found, want)


# Loops.


def drop_in_a_loop(x):
    def body(i, h):
        return i + 1, drop(h) + tf.nn.dropout(tf.ones_like(h), 0.5)

    return tf.while_loop(lambda i, _: i < 3, body, (0, x))[1]


def test_loops_draw_like_the_plain_model():
    assert_eager_equals(drop_in_a_loop, check(drop_in_a_loop, BATCH_FIRST))


def test_a_loop_of_tf1s_old_kind_is_an_error():
    with tf.Graph().as_default(), plan_free_randomness(STEP):
        tf.compat.v1.disable_control_flow_v2()
        try:
            with pytest.raises(PipelineError, match="enable_control_flow_v2"):
                tf.while_loop(lambda i: i < 3, lambda i: i + tf.random.uniform([]), [0.0])
        finally:
            tf.compat.v1.enable_control_flow_v2()


# Dims that are folded into the batch's.


def heads_first(x):
    """All examples' first heads, then all second ones."""
    parts = tf.nn.dropout(tf.concat(tf.split(x, HEADS, -1), 0), 0.5)
    return tf.concat(tf.split(parts, HEADS, 0), -1)


def attention(x):
    """Heads behind the batch; the mask meets probabilities, of which products are made."""
    split = [-1, TIME, HEADS, WIDTH // HEADS]
    heads = tf.reshape(tf.transpose(tf.reshape(x, split), [0, 2, 1, 3]), [-1, TIME, WIDTH // HEADS])
    # Large scores would make much of the last bit of an input.
    probs = tf.nn.softmax(tf.matmul(heads, heads, transpose_b=True) / 100)
    heads = tf.matmul(tf.nn.dropout(probs, 0.5), heads)
    heads = tf.reshape(heads, [-1, HEADS, TIME, WIDTH // HEADS])
    return tf.reshape(tf.transpose(heads, [0, 2, 1, 3]), x.shape)


# Draws in functions, loops and branches: `tests/randomness/test_example_flow.py`.
@pytest.mark.parametrize(("function", "num_microbatches"), [(heads_first, 2), (attention, 8)])
def test_masks_of_dims_folded_into_the_batch(function, num_microbatches):
    check(function, BATCH_FIRST, num_microbatches)


def batch_times_heads(x):
    return tf.reshape(tf.nn.dropout(tf.reshape(x, [TIME, -1, WIDTH // HEADS]), 0.5), x.shape)


def batch_times_time(x):
    flat = tf.nn.dropout(tf.reshape(tf.transpose(x, [1, 0, 2]), [-1, WIDTH]), 0.5)
    return tf.transpose(tf.reshape(flat, [x.shape[1], TIME, WIDTH]), [1, 0, 2])


@pytest.mark.parametrize("function", [batch_times_heads, batch_times_time])
def test_masks_of_dims_folded_into_a_second_batch_dim(function):
    check(function, TIME_FIRST, 4, batch_dim=1)


CONCRETE = tf.function(
    lambda x: tf.nn.experimental.stateless_dropout(x, 0.5, seed=[1, 2])
).get_concrete_function(tf.TensorSpec([None, TIME, WIDTH]))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            CONCRETE,
            r"'stage0' draws random numbers by .*the same for every microbatch; call the tf\.func",
        ),
        (
            tf.recompute_grad(lambda x: tf.nn.dropout(tf.tanh(x), 0.5)),
            r"drawn while gradients are computed.*recompute_grad",
        ),
        (
            lambda x: x + tf.reduce_sum(tf.random.normal([HEADS * x.shape[0]])),
            r"'layer0' draws .*folded into dim 0.*no element that is known to belong to an exa",
        ),
    ],
    ids=["concrete function", "recompute_grad", "unknown order"],
)
def test_draws_that_cannot_be_cut_are_errors(function, message):
    with pytest.raises(PipelineError, match=message):
        with_gradients(lambda x, w: pipelined(function, x, w, 4), BATCH_FIRST, WEIGHT)
