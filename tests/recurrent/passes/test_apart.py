"""No replica computes with what another one has computed."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import Home, Stage, pipeline
from pipemesh.schedule import gpipe
from tests.recurrent.passes.traced import WEIGHTS, WIDTH, traced_stage

HOME = Home(("CPU:1", "CPU:2"))
W = WEIGHTS[0]
X = np.random.default_rng(1).normal(size=[8, WIDTH]).astype(np.float32)


class Keeps:
    """A stage that keeps a tensor in Python from one call to the next."""

    def __init__(self, of):
        self.of = of
        self.kept = None

    def __call__(self, theta, carry, inputs, microbatch, step):
        h = tf.matmul(inputs[0], theta[0])
        if self.kept is None:
            self.kept = self.of(theta, carry, inputs, microbatch)
        return [h + tf.cast(self.kept, tf.float32)], [carry[0] + 1.0]


def with_kept(of):
    @tf.function(autograph=False)
    def run():
        stage = Stage("keeps", Keeps(of), [tf.constant(W)], [tf.constant(0.0)], HOME)
        return pipeline([stage], [tf.constant(X)], gpipe(1, 2))[0][0]

    return run


@pytest.mark.parametrize(
    "of",
    [
        lambda theta, carry, inputs, microbatch: inputs[0],
        lambda theta, carry, inputs, microbatch: tf.reduce_sum(tf.square(inputs[0])),
        lambda theta, carry, inputs, microbatch: tf.cast(theta[0], tf.float16)[0],
        lambda theta, carry, inputs, microbatch: carry[0],
        lambda theta, carry, inputs, microbatch: tf.cast(microbatch, tf.float32),
        lambda theta, carry, inputs, microbatch: tf.cond(
            carry[0] > 0, lambda: inputs[0], lambda: -inputs[0]
        ),
    ],
    ids=["input", "computed", "weight", "carry", "microbatch", "branch"],
)
def test_a_replica_that_uses_a_tensor_of_another_one_is_an_error(of):
    text = (
        r"stage 'keeps' has replicas, and its operation '.*replica\.1.*' \(\w+\) of replica 1 use"
    )
    with pytest.raises(PipelineError, match=text):
        with_kept(of)()


def test_what_is_the_same_for_all_replicas_may_be_kept():
    y = with_kept(lambda theta, carry, inputs, microbatch: tf.ones([WIDTH]) * 2)()
    np.testing.assert_allclose(y, X @ W + 2, rtol=1e-4)


def test_a_gradient_that_uses_a_tensor_of_another_replica_is_an_error():
    kept = []

    @tf.custom_gradient
    def squared(x):
        kept[:] = [x]
        return x * x, lambda dy: 2 * dy * kept[0]

    def forward(theta, carry, inputs, microbatch, step):
        return [squared(tf.matmul(inputs[0], theta[0]))], carry

    text = r"stage 's' .*gradients.*\(Mul\) of replica 0 uses .*, which replica 1 has computed"
    with tf.Graph().as_default(), pytest.raises(PipelineError, match=text):
        traced_stage(forward, replicas=2)


def test_a_single_replica_may_keep_what_it_likes():
    keeps = Keeps(lambda theta, carry, inputs, microbatch: inputs[0])
    with tf.Graph().as_default():
        traced_stage(keeps, carry=(0.0,))
