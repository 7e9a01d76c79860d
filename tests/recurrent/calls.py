"""Stages that call Python whenever they compute."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent import Options, Stage, pipeline_loss
from tests.devices import device_name


def calling(x, microbatch, call):
    """Returns `x`; its forward pass calls `call("F", microbatch)`, its backward pass with "B"."""

    def passed(value, kind, *more):
        def run(value, microbatch, *_):
            call(kind, int(microbatch))
            return value

        arguments = [value, microbatch, *more]
        result = tf.numpy_function(run, arguments, value.dtype, stateful=False)
        return tf.ensure_shape(result, value.shape)

    @tf.custom_gradient
    def cell(x):
        y = passed(x, "F")
        return y, lambda grad: passed(grad, "B", y)

    return cell(x)


def calling_stages(schedule, call, weights=None, has_loss=True):
    """Stages that multiply by their weights, if any, and call `call(stage, kind, microbatch)`."""
    last = schedule.num_stages - 1
    weights = weights or [1.0] * schedule.num_stages

    def make(number):
        def forward(theta, carry, inputs, microbatch, step):
            x = inputs[0] * theta[0] if theta else inputs[0]
            x = calling(x, microbatch, lambda *action: call(number, *action))
            return [tf.reduce_sum(x * x) if has_loss and number == last else x], []

        theta = [] if weights[number] is None else [tf.convert_to_tensor(weights[number])]
        return Stage(f"s{number}", forward, theta, [], device_name(schedule.stage_devices[number]))

    return [make(number) for number in range(schedule.num_stages)]


def calling_step(schedule, call, weights=None, **options):
    """A step of such stages, with the gradient of the inputs, one example a microbatch."""
    x = tf.constant(np.arange(schedule.num_microbatches, dtype=np.float32))

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            tape.watch(x)
            stages = calling_stages(schedule, call, weights)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=Options(**options))
        return tape.gradient(loss, x)

    return step
