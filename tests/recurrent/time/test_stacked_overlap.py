"""The layers of a recurrent stack really compute at the same time."""

import subprocess
import textwrap

import pytest

from tests.warm import warm

pytestmark = pytest.mark.serial
# A pipeline that waits for itself would wait for ever, so it runs in a process of its own.
PROGRAM = textwrap.dedent(
    """
    import time
    import tensorflow as tf
    from pipemesh.backend.devices import start_cpu_devices

    LAYERS, LENGTH, WAIT = 4, 12, 0.02
    start_cpu_devices(LAYERS)

    from pipemesh.recurrent import StackedRecurrent

    def wait(x):
        time.sleep(WAIT)
        return x

    @tf.custom_gradient
    def waiting(x):
        y = tf.ensure_shape(tf.numpy_function(wait, [x], tf.float32, stateful=False), x.shape)

        def grad(dy):
            # Needs y, so that the forward pass is computed again.
            dx = tf.numpy_function(wait, [dy + 0.0 * y], tf.float32, stateful=False)
            return tf.ensure_shape(dx, x.shape)

        return y, grad

    def cell(theta, state, inputs):
        return {"m": waiting(theta["w"] * (state["m"] + inputs["x"]))}, ()

    weights = [tf.Variable(0.5) for _ in range(LAYERS)]

    @tf.function(autograph=False)
    def run(x):
        with tf.GradientTape() as tape:
            over_time, _ = StackedRecurrent(
                [f"CPU:{i}" for i in range(LAYERS)],
                cell,
                None,
                lambda state: {"x": state["m"]},
                None,
                [{"w": w} for w in weights],
                [{"m": tf.zeros([2])}] * LAYERS,
                {"x": x},
            )
            loss = tf.reduce_sum(over_time["x"])
        return tape.gradient(loss, weights)

    def seconds():
        begin = time.perf_counter()
        [grad.numpy() for grad in run(tf.random.normal([LENGTH, 2]))]
        return time.perf_counter() - begin

    seconds()
    # Each time step of each layer is computed, computed again, and differentiated.
    print(min(seconds() for _ in range(3)) / (3 * LAYERS * LENGTH * WAIT))
    """
)


def test_waiting_layers_overlap_in_both_passes():
    done = subprocess.run(
        warm("-c", PROGRAM), capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    of_sequential_time = float(done.stdout.split()[-1])
    # (12 + 4 - 1) / (12 * 4) = 0.31 if starting cost nothing. With one chunk it is 0.7, since
    # computing a time step again need not wait for the gradient.
    assert of_sequential_time < 0.5, of_sequential_time
