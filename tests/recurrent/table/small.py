"""Two stages ready to act, and what their actions have to give."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent import Options, Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.machine import Machine, State
from pipemesh.schedule import one_f_one_b

MICROBATCHES, ROWS, WIDTH = 6, 2, 3
SCHEDULE = one_f_one_b(2, MICROBATCHES)
CUTTING = Cutting(MICROBATCHES, ROWS, 0)
MODES = {(s, m): FULL for s in range(2) for m in range(MICROBATCHES)}
_RNG = np.random.default_rng(0)
X, DY = _RNG.normal(size=[2, MICROBATCHES * ROWS, WIDTH]).astype(np.float32)
WEIGHTS = _RNG.normal(size=[2, WIDTH, WIDTH]).astype(np.float32)


def layer(theta, carry, inputs, microbatch, step):
    """A product, and a count."""
    return [tf.tanh(tf.matmul(inputs[0], theta[0]))], [carry[0] + 1]


def small_stages(forward=layer):
    """Both stages, each on a device of its own."""
    return [
        Stage(f"s{i}", forward, [tf.constant(w)], [tf.constant(0)], f"CPU:{i + 1}")
        for i, w in enumerate(WEIGHTS)
    ]


def small_machine():
    """A machine of two stages in the current graph, with its state."""
    machine = Machine(
        small_stages(),
        SCHEDULE,
        [tf.constant(X)],
        CUTTING,
        None,
        [[tf.float32]] * 2,
        Options(check_numerics="off"),
    )
    return machine, State.before(machine.stages, SCHEDULE.stage_devices)


def wanted():
    """Outputs and gradients of inputs and weights, for the whole batch."""
    x, weights = tf.constant(X), [*map(tf.constant, WEIGHTS)]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        y = x
        for weight in weights:
            y = tf.tanh(tf.matmul(y, weight))
    return [y, *tape.gradient(y, [x, *weights], tf.constant(DY))]


def assert_close(found, expected):
    """Each tensor is the one that is expected, to round-off."""
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
