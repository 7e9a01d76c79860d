"""What a run would hold and send is known before anything runs."""

import tensorflow as tf

from pipemesh.backend.static_shape import num_bytes
from pipemesh.recurrent import Home, Options, Stage
from pipemesh.recurrent.table.run import Run
from pipemesh.recurrent.table.values import GRADS, KEPT, OUTPUTS
from pipemesh.schedule import gpipe
from tests.recurrent.table.small import MICROBATCHES, X, small_stages


def run_of(schedule, stages=None, **options):
    return Run(stages or small_stages(), [tf.constant(X)], schedule, None, Options(**options))


def test_bytes_are_those_of_shapes_and_dtypes():
    assert num_bytes([tf.TensorSpec([2, 3]), tf.TensorSpec([], tf.int64)]) == 32
    with tf.Graph().as_default():
        run = run_of(gpipe(2, MICROBATCHES))
        assert (run.sizes.weights(1, [0]), run.sizes.sums(1, 0)) == (36, 36)
        assert run.sizes.values(KEPT, 1, 0) == 24
        assert run.sizes.values(OUTPUTS, -1, 0) == run.sizes.values(GRADS, 1, 0) == 24
        assert run.sizes.carries(0) == 4
        half = run_of(gpipe(2, MICROBATCHES), compute_dtype="bfloat16")
        assert (half.sizes.weights(1, [0]), half.sizes.sums(1, 0)) == (18, 36)


def test_weights_go_out_from_their_owners_and_their_gradients_come_back():
    def forward(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0] + theta[1][0]], []

    with tf.Graph().as_default():
        theta = [tf.ones([3]), tf.ones([5])]
        home = Home(("CPU:0", "CPU:1"))
        stage = Stage("s", forward, theta, [], home, places=[0, 1])
        sizes = run_of(gpipe(1, 2), [stage]).sizes
        assert {pair: n for pair, n in sizes.weights_sent(0).items() if len({*pair}) > 1} == {
            (0, 1): 12,
            (1, 0): 20,
        }
        assert {pair: n for pair, n in sizes.sums_sent(0).items() if len({*pair}) > 1} == {
            (1, 0): 12,
            (0, 1): 20,
        }
        # Each replica holds all of them while it computes.
        assert sizes.weights(0, [0]) == sizes.weights(0, [1]) == 32
