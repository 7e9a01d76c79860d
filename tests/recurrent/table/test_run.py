"""A run says what it performs, what gradients flow to, and what it holds."""

import types

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.operations import pin_behind
from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.run import Checks, loop_pays, place, with_loss
from pipemesh.recurrent.watch.finite_values import Probe, empty_note
from pipemesh.schedule import execution_order, gpipe, interleaved_one_f_one_b, one_f_one_b
from tests.recurrent.passes.traced import WIDTH, run, traced_stage
from tests.recurrent.table.small import (
    WEIGHTS,
    X,
    small_stages,
)


def pays(schedule, nodes_of_action):
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    return loop_pays(order, modes, nodes_of_action * len(order))


@pytest.mark.parametrize(
    ("schedule", "nodes_of_action", "is_loop"),
    [
        # Small in all.
        (one_f_one_b(2, 8), 5, False),
        (one_f_one_b(2, 4), 200, False),
        # Many small actions.
        (interleaved_one_f_one_b(8, 32), 10, False),
        (one_f_one_b(32, 64), 10, True),
        # Large actions.
        (gpipe(2, 16), 200, True),
        # The loop would have each action, too.
        (gpipe(16, 1), 5_000, False),
    ],
)
def test_the_size_of_the_graph_decides_by_default(schedule, nodes_of_action, is_loop):
    assert pays(schedule, nodes_of_action) == is_loop


def test_of_a_last_stage_the_loss_alone_has_a_gradient():
    def forward(theta, *rest):
        return [theta[0] * 2.0, theta[0] * 3.0], []

    stage = with_loss(small_stages(forward)[0])
    x, weight = tf.constant(X), tf.constant(WEIGHTS[0])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(weight)
        (loss, other), _ = stage.forward([weight], [], [x], None, None)
    np.testing.assert_array_equal(tape.gradient(loss, weight), np.full([3, 3], 2.0))
    assert tape.gradient(other, weight) is None


NAN = float("nan")


def checks_of(policy):
    probes = {"forward": [[Probe(("first",), ("t:0",))]], "backward": [[]]}
    cutting = Cutting(2, 2, 0)
    machine = types.SimpleNamespace(traced=[traced_stage()], probes=probes, cutting=cutting)
    return Checks(policy, machine)


def test_a_place_names_stage_device_and_layers():
    stage = Stage("s", None, [], [], ("CPU:1", "CPU:2"))
    assert place(stage, ("a", "b"), "rest", 1) == "stage 's' (CPU:2), layer 'a' or 'b', rest"
    assert place(stage, (), "rest") == "stage 's' (CPU:1), rest"
    assert place(Stage("s", None, [], [], ""), (), "rest") == "stage 's', rest"


@pytest.mark.parametrize("policy", ["results", "loss"])
def test_gradients_are_checked_where_the_policy_says(policy):
    with tf.Graph().as_default():
        checks = checks_of(policy)
        checks.forward([tf.constant(1.0)], "the loss", [[empty_note()]])
        (both,) = pin_behind(checks.passed_both(), [tf.constant(7.0)], "CPU:1")
        bad = tf.fill([WIDTH, WIDTH], NAN)
        checks.backward([[None, bad]], [[empty_note()]])
        (grad,) = pin_behind(checks.passed_backward, [tf.constant(8.0)], "CPU:1")
        (forward,) = pin_behind(checks.passed_forward, [tf.constant(9.0)], "CPU:1")
        assert run(forward) == 9.0
        if policy == "loss":
            assert run([both, grad]) == [7.0, 8.0]
        else:
            text = r"layer .*second.*, backward: a gradient of shape \(3, 3\), summed over"
            for tensor in (both, grad):
                with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                    run(tensor)


def test_all_gradients_wait_for_requested_input_gradients():
    with tf.Graph().as_default():
        checks = checks_of("results")
        checks.backward([[tf.zeros([2]), None]], [[empty_note()]])
        (grad,) = pin_behind(checks.passed_backward, [tf.constant(8.0)], "CPU:1")
        assert run(grad) == 8.0
        # The third example is one of the second microbatch.
        bad = tf.constant([[0.0], [0.0], [NAN], [0.0]])
        checks.input_grads([bad])
        text = r"layer .*first.*, microbatch 1, backward: the gradient of input 0 is not"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(grad)
