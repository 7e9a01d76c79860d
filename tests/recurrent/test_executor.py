"""The pipelined computation equals the plain one, tensor by tensor, in both execution modes."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent import Options, Stage, pipeline
from pipemesh.schedule import forward_only, gpipe, one_f_one_b
from tests.recurrent import stack


@pytest.mark.parametrize(
    ("mode", "remat", "num_stages", "num_microbatches"),
    [("tf1", "none", 1, 4), ("tf1", "full", 2, 2), ("tf2", "none", 2, 6), ("tf2", "full", 2, 1)],
)
def test_with_the_loss_outside_all_equals_the_plain_model(
    mode, num_stages, num_microbatches, remat
):
    schedule = gpipe(num_stages, num_microbatches)

    def build(theta):
        (h, labels), carries = pipeline(
            stack.stages(theta, schedule, has_loss=False),
            [tf.constant(stack.IDS), tf.constant(stack.LABELS)],
            schedule,
            step=tf.constant(stack.STEP, tf.int64),
            options=Options(remat=remat),
        )
        return [*stack.head(h, labels), [carry[0] for carry in carries]]

    assert stack.assert_equal(mode, build) == [num_microbatches] * num_stages


def scale(theta, carry, inputs, microbatch, step):
    return [inputs[0] * theta[0], *inputs[1:]], []


def scale_stages(num_stages, weights):
    return [Stage(f"s{i}", scale, [weights[i]], [], f"CPU:{i}") for i in range(num_stages)]


def test_two_losses_of_one_pipeline_have_their_own_gradients():
    with tf.Graph().as_default():
        w = tf.compat.v1.get_variable("w", initializer=2.0)
        (y,), _ = pipeline(scale_stages(1, [tf.identity(w)]), [tf.ones([4])], gpipe(1, 2))
        grads = [tf.gradients(loss, w)[0] for loss in (tf.reduce_sum(y), tf.reduce_sum(y * y))]
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            assert session.run(grads) == [4.0, 16.0]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"schedule": gpipe(2, 3)}, PipelineError, "a batch of 8 does not divide into 3"),
        ({"schedule": gpipe(3, 2)}, ScheduleError, "3 stages, but 2 were given"),
        ({"batch_dim": 1}, PipelineError, "no dim 1"),
        ({"schedule": one_f_one_b(2, 4)}, ScheduleError, "tick 3: 0F2 follows a backward action"),
    ],
)
def test_bad_plans_are_errors_before_anything_runs(change, error, message):
    @tf.function
    def run():
        arguments = {"inputs": [tf.ones([8])], "schedule": gpipe(2, 2), **change}
        inputs, schedule = arguments.pop("inputs"), arguments.pop("schedule")
        stages = scale_stages(2, [tf.constant(1.0)] * 2)
        pipeline(stages, inputs, schedule, options=Options(**arguments))

    with pytest.raises(error, match=message):
        run()


def test_eager_calls_are_errors_that_say_what_to_do():
    with pytest.raises(PipelineError, match=r"inside a tf\.function"):
        pipeline(scale_stages(1, [tf.constant(1.0)]), [tf.ones([2])], gpipe(1, 1))


def test_a_forward_only_schedule_refuses_gradients():
    @tf.function
    def run(x, train):
        weight = tf.constant(3.0)
        with tf.GradientTape() as tape:
            tape.watch(weight)
            (y,), _ = pipeline(scale_stages(2, [weight] * 2), [x], forward_only(2, 4))
        return tape.gradient(y, weight) if train else y

    np.testing.assert_allclose(run(tf.ones([8]), False), 9 * np.ones(8))
    with pytest.raises(ScheduleError, match="no backward actions"):
        run(tf.ones([8]), True)


@pytest.mark.parametrize(
    ("use_resource", "num_microbatches", "homes"),
    [(True, 1, ["CPU:0"]), (False, 1, ["CPU:0", "CPU:1"]), (True, 4, ["CPU:0", "CPU:1"]),
     (False, 4, ["CPU:0"])],
)  # fmt: skip
def test_constant_ids_passed_through_come_back_in_a_session(use_resource, num_microbatches, homes):
    ids = np.arange(16, dtype=np.int32)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        with tf.compat.v1.variable_scope("", use_resource=use_resource):
            table = tf.compat.v1.get_variable("table", initializer=tf.ones([16, 4]))

        def look_up(theta, carry, inputs, microbatch, step):
            return [tf.gather(theta[0], inputs[0]), inputs[0]], []

        stage = Stage("s", look_up, [tf.convert_to_tensor(table)], [], homes)
        outputs, _ = pipeline([stage], [tf.constant(ids)], gpipe(1, num_microbatches))
        session.run(table.initializer)
        np.testing.assert_array_equal(session.run(outputs)[1], ids)


@pytest.mark.parametrize(
    ("is_persistent", "is_inside"), [(False, False), (True, False), (True, True)]
)
def test_a_persistent_tape_gives_its_gradient_twice(is_persistent, is_inside):
    """Also the gradient of a function that is called eagerly."""
    weights, x = [tf.Variable(2.0), tf.Variable(3.0)], tf.ones([8])

    def forward(x):
        stages = scale_stages(2, [tf.convert_to_tensor(w) for w in weights])
        (y,), _ = pipeline(stages, [x], gpipe(2, 4))
        return tf.reduce_sum(y * y)

    call = forward if is_inside else tf.function(forward, autograph=False)

    def gradients():
        with tf.GradientTape(persistent=is_persistent) as tape:
            tape.watch(x)
            loss = call(x)
        return [tape.gradient(loss, [x, *weights]) for _ in range(1 + is_persistent)]

    found = (tf.function(gradients, autograph=False) if is_inside else gradients)()
    for grad_x, *grads in found:
        np.testing.assert_allclose(grad_x, 72 * np.ones(8))
        np.testing.assert_allclose(grads, [8 * 2 * 6 * 3, 8 * 2 * 6 * 2])
