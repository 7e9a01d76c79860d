"""Stages whose state goes from microbatch to microbatch, and its gradient back."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ScheduleError
from pipemesh.recurrent import Options, Stage, pipeline
from pipemesh.schedule import gpipe, one_f_one_b

NUM_STAGES, NUM_MICROBATCHES = 3, 6
RNG = np.random.default_rng(2)
VALUES = {
    "w": RNG.normal(size=[NUM_STAGES, 4, 4]).astype(np.float32),
    "state": RNG.normal(size=[NUM_STAGES, 2, 4]).astype(np.float32),
    "x": RNG.normal(size=[2 * NUM_MICROBATCHES, 4]).astype(np.float32),
}


def forward(theta, carry, inputs, microbatch, step):
    """A state with gradient, one without, and an integer."""
    state, seen, count = carry
    y = tf.tanh(tf.matmul(inputs[0], theta[0]) + state)
    return [y], [0.5 * state + y, seen + tf.stop_gradient(tf.reduce_sum(y)), count + 1]


def carry_of(state):
    return [state, tf.zeros([]), tf.constant(0)]


def plain(v):
    carries, outputs = [carry_of(v["state"][i]) for i in range(NUM_STAGES)], []
    for part in tf.split(v["x"], NUM_MICROBATCHES):
        y = [part]
        for i in range(NUM_STAGES):
            y, carries[i] = forward([v["w"][i]], carries[i], y, None, None)
        outputs.extend(y)
    return tf.concat(outputs, axis=0), carries


def piped(v, options, schedule=None):
    stages = [
        Stage(f"s{i}", forward, [v["w"][i]], carry_of(v["state"][i]), f"CPU:{i}", recurrent=True)
        for i in range(NUM_STAGES)
    ]
    schedule = schedule or gpipe(NUM_STAGES, NUM_MICROBATCHES)
    (output,), carries = pipeline(stages, [v["x"]], schedule, options=options)
    return output, carries


def run(build):
    variables = {name: tf.Variable(value) for name, value in VALUES.items()}

    @tf.function(autograph=False)
    def call():
        with tf.GradientTape() as tape:
            output, carries = build({k: tf.identity(v) for k, v in variables.items()})
            loss = tf.reduce_sum(tf.sin(output))
            for i, (state, seen, _) in enumerate(carries):
                loss += tf.reduce_sum(tf.sin((i + 2.0) * state)) + seen
        return (output, carries), tape.gradient(loss, variables)

    return call()


@pytest.fixture(scope="module")
def want():
    return run(plain)


@pytest.mark.parametrize(("loop", "remat"), [(False, "none"), (True, "full")])
def test_states_and_all_gradients_equal_the_plain_loop(want, loop, remat):
    got = run(lambda v: piped(v, Options(loop=loop, remat=remat)))
    tf.nest.map_structure(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), got, want
    )
    assert all(int(carry[2]) == NUM_MICROBATCHES for carry in got[0][1])


def test_backward_in_ascending_order_is_an_error():
    with pytest.raises(ScheduleError, match="backwards descend"):
        run(lambda v: piped(v, Options(), one_f_one_b(NUM_STAGES, NUM_MICROBATCHES)))
