"""At each tick a core computes the stage whose turn it is, and nothing where it has no work."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.circular.tick_loop import Tick
from pipemesh.recurrent.circular.traced_stages import TracedStages
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.table.machine import Machine

# Four stages, two on each core, for microbatches of two examples.
DEVICES = ["CPU:0", "CPU:1"]
WEIGHTS = [2.0, 3.0, 5.0, 7.0]
MICROBATCHES = (1, 3)
X = np.asarray([[1.0, 2.0], [3.0, 4.0]], np.float32)
COUNT = np.asarray([1, 2], np.int32)
GRAD = np.asarray([[1.0, 10.0], [100.0, 1000.0]], np.float32)


def stage(theta, carry, inputs, microbatch, step):
    x = tf.debugging.check_numerics(inputs[0], "it was computed")
    scale = tf.cast(100 * microbatch + step, tf.float32)
    return [x * theta[0] ** 2 + scale, inputs[1] + 1], []


def traced():
    stages = [
        Stage(f"s{i}", stage, [tf.constant(w)], [], DEVICES[i % 2]) for i, w in enumerate(WEIGHTS)
    ]
    inputs = [tf.zeros([8, 2]), tf.zeros([8], tf.int32)]
    step, dtypes = tf.constant(7, tf.int64), [[tf.float32]] * 4
    cutting = Cutting(4, 2, 0)
    machine = Machine(stages, (0, 1, 0, 1), inputs, cutting, step, dtypes, "off", None, False)
    return TracedStages(machine, DEVICES)


def tick(turns):
    """From a number for each core: which of its stages has its turn; -1 if none has."""
    rounds = [tf.maximum(turn, 0) for turn in tf.unstack(turns)]
    stages = [2 * one + core for core, one in enumerate(rounds)]
    busy = [turn >= 0 for turn in tf.unstack(turns)]
    slots = (tf.constant(0), tf.constant(0), tf.constant(False))
    microbatches = tuple(map(tf.constant, MICROBATCHES))
    return Tick(tuple(stages), tuple(rounds), microbatches, tuple(busy), *slots)


def leaves(x):
    """The activations of both cores, of which the second has the opposite ones."""
    return (x, -x), (tf.constant(COUNT), tf.constant(COUNT))


TURNS = list(itertools.product((-1, 0, 1), repeat=2))
SIGNATURE = [tf.TensorSpec([2], tf.int32), tf.TensorSpec([2, 2])]


@pytest.fixture(scope="module")
def forward():
    @tf.function(autograph=False, input_signature=SIGNATURE)
    def run(turns, x):
        return traced().forward(tick(turns), leaves(x), [])

    return run


def test_forward_a_core_computes_its_turn_or_hands_on_what_it_was_given(forward):
    for turns in TURNS:
        x, counts = forward(turns, X)
        for core, (turn, given) in enumerate(zip(turns, (X, -X), strict=True)):
            wanted, count = given, COUNT
            if turn >= 0:
                wanted = given * WEIGHTS[2 * turn + core] ** 2 + 100 * MICROBATCHES[core] + 7
                count = COUNT + 1
            np.testing.assert_allclose(x[core], wanted)
            np.testing.assert_array_equal(counts[core], count)


def test_without_work_nothing_is_computed_so_no_check_fails(forward):
    nothing = np.full([2, 2], np.nan, np.float32)
    assert np.isnan(forward((-1, -1), nothing)[0]).all()
    with pytest.raises(tf.errors.InvalidArgumentError, match="it was computed"):
        forward((-1, 1), nothing)


def test_what_a_core_computes_is_on_its_device(forward):
    graph = forward.get_concrete_function().graph
    choices = [op.device for op in graph.get_operations() if "Case" in op.type]
    assert [device[-1] for device in choices] == ["0", "1"]


def test_backward_the_sums_of_its_stage_grow_and_no_others():
    @tf.function(autograph=False, input_signature=SIGNATURE)
    def run(turns, x):
        stages = traced()
        assert stages.floating == [0]
        sums = [tuple(t + number for t in one) for number, one in enumerate(stages.zero_sums([]))]
        grads = ((tf.constant(GRAD), tf.constant(2 * GRAD)),)
        return stages.backward(tick(turns), leaves(x), [], grads, sums)

    for turns in TURNS:
        (grad_x,), sums = run(turns, X)
        wanted_sums = [0.0, 1, 2, 3]
        for core, (turn, given, grad) in enumerate(
            zip(turns, (X, -X), (GRAD, 2 * GRAD), strict=True)
        ):
            number = 2 * turn + core
            wanted = grad * WEIGHTS[number] ** 2 if turn >= 0 else np.zeros_like(X)
            np.testing.assert_allclose(grad_x[core], wanted)
            if turn >= 0:
                wanted_sums[number] += 2 * WEIGHTS[number] * (given * grad).sum()
        np.testing.assert_allclose([one for (one,) in sums], wanted_sums)
