"""Run as a program: steps in which an operation of a stage fails, in one execution mode."""

import os
import sys
import time

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"

import numpy as np
import tensorflow as tf

STAGES, MICROBATCHES = 4, 8
CALM = -np.ones(2, np.int32)


def start_devices():
    tf.config.set_logical_device_configuration(
        tf.config.list_physical_devices("CPU")[0],
        [tf.config.LogicalDeviceConfiguration()] * STAGES,
    )
    tf.config.threading.set_inter_op_parallelism_threads(STAGES)


def slow(x, _):
    # Others are waiting or at work when a stage fails.
    time.sleep(0.005)
    return x


def fail(x, fails):
    time.sleep(0.005)
    if fails:
        raise ValueError("the cable\nis loose")
    return x


def call(function, x, flag):
    y = tf.numpy_function(function, [x, flag], tf.float32, stateful=False)
    y.set_shape(x.shape)
    return y


def failing_layer(x, at, microbatch):
    """Fails in Python going forward (at[0]) or backward (at[1]), or out of range (at[0] - 100)."""

    @tf.custom_gradient
    def layer(x):
        mine = tf.cast(microbatch, tf.int32)
        y = call(fail, x, tf.equal(mine, at[0]))
        y = tf.gather(y, tf.where(tf.equal(mine, at[0] - 100), [[7], [0]], [[0], [1]])[:, 0])
        return y, lambda dy: call(fail, dy, tf.equal(mine, at[1]))

    return layer(x)


def build(weights, at, layer_scope, Stage, pipeline_loss, schedule):
    def make(s):
        def forward(theta, carry, inputs, microbatch, step):
            x = inputs[0] * theta[0]
            with layer_scope("before"):
                x = tf.custom_gradient(
                    lambda x: (call(slow, x, microbatch), lambda dy: call(slow, dy, microbatch))
                )(x)
            if s == 2:
                with layer_scope("block#3"):
                    x = failing_layer(x, inputs[1], microbatch)
            at = [tf.reshape(inputs[1], [2])]
            return ([tf.reduce_sum(x)] if s == STAGES - 1 else [x, *at]), []

        return Stage(f"stage {s}", forward, [weights[s]], [], f"CPU:{s}")

    x = tf.range(2.0 * MICROBATCHES)
    every = tf.tile(at, [MICROBATCHES])
    return pipeline_loss([make(s) for s in range(STAGES)], [x, every], schedule)[0]


def main(mode):
    start_devices()
    from pipemesh.randomness import layer_scope
    from pipemesh.recurrent import Stage, explain, pipeline_loss
    from pipemesh.schedule import one_f_one_b

    tools = layer_scope, Stage, pipeline_loss, one_f_one_b(STAGES, MICROBATCHES)
    if mode == "tf2":
        weights = [tf.Variable(1.0) for _ in range(STAGES)]

        @tf.function(autograph=False)
        def step(at):
            with tf.GradientTape() as tape:
                loss = build([tf.convert_to_tensor(w) for w in weights], at, *tools)
            for weight, grad in zip(weights, tape.gradient(loss, weights), strict=True):
                weight.assign_sub(1e-9 * grad)
            return loss

        def values():
            return [float(w) for w in weights]
    else:
        tf.compat.v1.disable_eager_execution()
        weights = [tf.compat.v1.get_variable(f"w{s}", initializer=1.0) for s in range(STAGES)]
        fed = tf.compat.v1.placeholder(tf.int32, [2])
        loss = build([tf.identity(w) for w in weights], fed, *tools)
        grads = tf.gradients(loss, weights)
        train = [w.assign_sub(1e-9 * g) for w, g in zip(weights, grads, strict=True)]
        session = tf.compat.v1.Session(
            config=tf.compat.v1.ConfigProto(
                device_count={"CPU": STAGES}, inter_op_parallelism_threads=STAGES
            )
        )
        session.run(tf.compat.v1.global_variables_initializer())

        def step(at):
            session.run(train, {fed: at})

        def values():
            return session.run(weights)

    step(CALM)
    for at in ([5, -1], [-1, 3], [106, -1]):
        before = values()
        begin = time.perf_counter()
        try:
            step(np.int32(at))
            print("no error")
        except tf.errors.OpError as error:
            seconds = time.perf_counter() - begin
            print(explain(error, {"stage 2": "CPU:2"}))
            print("prompt" if seconds < 10 else f"after {seconds} s")
        print("unchanged" if values() == before else "changed")
    step(CALM)
    print("goes on")


if __name__ == "__main__":
    main(sys.argv[1])
