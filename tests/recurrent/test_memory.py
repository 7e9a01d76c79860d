"""Predicted memory follows from shapes, schedule and remat policy."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Options, Selective, Stage, pipeline_loss, predict_memory
from pipemesh.recurrent.memory import DeviceMemory
from pipemesh.schedule import (
    forward_only,
    gpipe,
    interleaved_one_f_one_b,
    one_f_one_b,
    recompute,
    zb_h1,
)

ROWS, WIDTH, HIDDEN, FLOAT = 2, 4, 32, 4
WEIGHTS = 2 * WIDTH * HIDDEN * FLOAT
# Of a microbatch: a stage's input, and what tanh and the second product need.
INPUT, INSIDE = ROWS * WIDTH * FLOAT, ROWS * HIDDEN * FLOAT


def block(theta, carry, inputs, microbatch, step):
    h = inputs[0]
    with layer_scope("wide"):
        h = tf.nn.tanh(tf.matmul(h, theta[0]))
    with layer_scope("narrow"):
        return [tf.matmul(h, theta[1])], []


def predict(schedule, compute_dtype=None, **options):
    with tf.Graph().as_default():
        theta = [tf.ones([WIDTH, HIDDEN]), tf.ones([HIDDEN, WIDTH])]
        stages = [Stage(f"s{i}", block, theta, [], "CPU:0") for i in range(schedule.num_stages)]
        x = tf.ones([ROWS * schedule.num_microbatches, WIDTH])
        return predict_memory(
            stages, [x], schedule, options=Options(compute_dtype=compute_dtype, **options)
        )


@pytest.mark.parametrize(
    ("remat", "bytes_each"),
    [
        ("full", INPUT),
        ("none", INPUT + INSIDE),
        (Selective(lambda name: name == "wide"), INPUT),
        (Selective(lambda name: name == "narrow"), INPUT + INSIDE),
    ],
)
def test_a_device_holds_what_is_kept_of_the_microbatches_in_flight(remat, bytes_each):
    for schedule, in_flight in [
        (gpipe(4, 8), [8, 8, 8, 8]),
        (one_f_one_b(4, 8), [4, 3, 2, 1]),
        (interleaved_one_f_one_b(2, 4, 2), [5, 3]),
    ]:
        assert [device.kept for device in predict(schedule, remat=remat)] == [
            count * bytes_each for count in in_flight
        ]


def test_weights_and_gradients_count_once_a_stage():
    for device in predict(interleaved_one_f_one_b(2, 4, 2)):
        assert (device.weights, device.gradients) == (2 * WEIGHTS, 2 * WEIGHTS)
        assert device.total == 4 * WEIGHTS + device.kept


def test_except_last_keeps_all_of_the_microbatch_that_turns_around():
    first, last = predict(one_f_one_b(2, 8), remat="except_last")
    assert first.kept == 2 * INPUT
    assert last.kept == INPUT + INSIDE


def test_a_split_backward_pass_holds_until_its_second_half():
    without = predict(one_f_one_b(4, 8), remat="none")
    split = predict(zb_h1(4, 8), remat="none")
    assert split[3].kept > without[3].kept
    assert split[0].kept >= without[0].kept


def test_a_second_half_that_computes_again_is_left_gradients_alone():
    once, twice = (predict(zb_h1(4, 8), remat=remat) for remat in ("full", "twice"))
    # Of so many microbatches the first half is done at most. Left to the second one are the input
    # and the gradients of both products, and by `full` also what the second product multiplies.
    assert [o.kept - t.kept for o, t in zip(once, twice, strict=True)] == [
        count * INSIDE for count in (1, 2, 3, 4)
    ]


def test_what_an_action_of_its_own_computes_again_is_held_from_there_to_its_backward_pass():
    schedule = recompute(one_f_one_b(4, 8), stages=[0])
    first, second, *_ = predict(schedule, remat="none")
    assert first.kept == 4 * INPUT + INSIDE
    assert second.kept == 3 * (INPUT + INSIDE)


def test_inference_keeps_nothing():
    assert predict(forward_only(2, 4), remat="none") == [DeviceMemory(WEIGHTS, 0, 0)] * 2


def test_half_the_bits_take_half_the_memory_but_not_the_gradients():
    full, half = predict(gpipe(1, 2)), predict(gpipe(1, 2), compute_dtype="bfloat16")
    assert half[0].weights * 2 == full[0].weights
    assert half[0].kept * 2 == full[0].kept
    assert half[0].gradients == full[0].gradients == np.prod([2, WIDTH, HIDDEN, FLOAT])


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("remat", ["full", "none"])
def test_what_follows_from_the_losses_gradient_alone_is_not_kept_for_every_microbatch(remat, loop):
    # Ones of the shape of y: a constant, if the optimizer can see it, of each backward action.
    microbatches, rows, width = 32, 1024, 256
    one_mb = rows * width * FLOAT

    def stretch(theta, carry, inputs, microbatch, step):
        y = inputs[0] * theta[0]
        return [tf.reduce_sum(y * y)], []

    weight, x = tf.Variable(tf.ones([width])), tf.ones([microbatches * rows, 1])

    @tf.function
    def run():
        with tf.GradientTape() as tape:
            stages = [Stage("only", stretch, [tf.convert_to_tensor(weight)], [], "CPU:0")]
            loss, _, _ = pipeline_loss(
                stages,
                [x],
                one_f_one_b(1, microbatches),
                options=Options(remat=remat, loop=loop),
            )
        return loss, tape.gradient(loss, weight)

    memory = TensorMemory("CPU:0")
    if not memory.is_counted:
        pytest.skip("this build of TensorFlow does not count the CPU's memory")
    begin = memory.current
    run()
    assert memory.current - begin <= 4 * one_mb, "held between steps"
    memory.forget_peak()
    loss, grad = run()
    assert memory.peak - begin <= 8 * one_mb
    assert float(loss) == microbatches * rows * width
    np.testing.assert_array_equal(grad, np.full(width, 2 * microbatches * rows, np.float32))


def test_a_tensor_that_is_needed_in_several_shapes_counts_once():
    def reshaped(theta, carry, inputs, microbatch, step):
        h = tf.nn.tanh(tf.matmul(inputs[0], theta[0]))
        # The gradient of tanh needs its result, and that of the product the same in another shape.
        flat = tf.reshape(h, [2 * ROWS, HIDDEN // 2])
        return [tf.reshape(tf.matmul(flat, tf.reshape(theta[1], [HIDDEN // 2, 8])), [ROWS, 16])], []

    with tf.Graph().as_default():
        theta = [tf.ones([WIDTH, HIDDEN]), tf.ones([HIDDEN, WIDTH])]
        stage = Stage("s", reshaped, theta, [], "CPU:0")
        x = tf.ones([ROWS, WIDTH])
        (device,) = predict_memory([stage], [x], gpipe(1, 1), options=Options(remat="none"))
    assert device.kept == INPUT + INSIDE


def test_between_both_halves_a_tensor_in_several_shapes_counts_once():
    """Products of more dims are products of matrices: of the same tensors in another shape."""

    def flat(theta, carry, inputs, microbatch, step):
        h = tf.nn.relu(tf.einsum("rlw,wh->rlh", inputs[0], theta[0]))
        return [tf.einsum("rlh,hw->rlw", h, theta[1])], []

    with tf.Graph().as_default():
        theta = [tf.ones([WIDTH, HIDDEN]), tf.ones([HIDDEN, WIDTH])]
        stages = [Stage(f"s{i}", flat, theta, [], "CPU:0") for i in range(2)]
        x = tf.ones([2 * ROWS, 3, WIDTH])
        options = Options(remat="none")
        devices = predict_memory(stages, [x], zb_h1(2, 2), options=options)
    # The input, what the rectifier gives, and the gradients of what both products give.
    assert devices[1].stages[0].pending == 3 * 2 * (INPUT + INSIDE)
