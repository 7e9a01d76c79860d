"""What leaves a pipeline waits until it is known to be finite."""

import pytest
import tensorflow as tf

from pipemesh.recurrent import Stage
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.table.checks import Checks, place
from pipemesh.recurrent.watch.finite_values import Probe, empty_note
from tests.recurrent.passes.traced import WIDTH, run, traced_stage

NAN = float("nan")


def checks_of(policy):
    probes = {"forward": [[Probe(("first",), ("t:0",))]], "backward": [[]]}
    return Checks(policy, [traced_stage()], probes, Cutting(2, 2, 0))


def test_a_place_names_stage_device_and_layers():
    stage = Stage("s", None, [], [], ("CPU:1", "CPU:2"))
    assert place(stage, ("a", "b"), "rest", 1) == "stage 's' (CPU:2), layer 'a' or 'b', rest"
    assert place(stage, (), "rest") == "stage 's' (CPU:1), rest"
    assert place(Stage("s", None, [], [], ""), (), "rest") == "stage 's', rest"


@pytest.mark.parametrize("policy", ["all", "forward", "results", "loss", "off"])
@pytest.mark.parametrize("value", [1.0, NAN])
def test_a_loss_that_is_not_finite_leaves_only_where_nothing_is_checked(policy, value):
    with tf.Graph().as_default():
        checks = checks_of(policy)
        checks.forward([tf.constant(value)], "the loss", [[empty_note()]])
        (other,) = checks.after_forward([tf.constant(7.0)], "CPU:1")
        if policy == "off" or value == 1.0:
            assert run(other) == 7.0
        else:
            with pytest.raises(tf.errors.InvalidArgumentError, match="forward: the loss is not"):
                run(other)


def test_a_note_says_where_it_began():
    with tf.Graph().as_default():
        checks = checks_of("all")
        checks.forward([tf.constant(NAN)], "the loss", [[tf.constant(1, tf.int64)]])
        (other,) = checks.after_forward([tf.constant(7.0)], "CPU:1")
        text = r"stage .*s.* \(CPU:1\), layer .*first.*, microbatch 1, forward: its output is not"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(other)


@pytest.mark.parametrize("policy", ["results", "loss"])
def test_gradients_are_checked_where_the_policy_says(policy):
    with tf.Graph().as_default():
        checks = checks_of(policy)
        checks.forward([tf.constant(1.0)], "the loss", [[empty_note()]])
        (both,) = checks.after_both([tf.constant(7.0)], "CPU:1")
        bad = tf.fill([WIDTH, WIDTH], NAN)
        checks.backward([[None, bad]], [[empty_note()]])
        (grad,) = checks.after_backward([tf.constant(8.0)], "CPU:1")
        (forward,) = checks.after_forward([tf.constant(9.0)], "CPU:1")
        assert run(forward) == 9.0
        if policy == "loss":
            assert run([both, grad]) == [7.0, 8.0]
        else:
            text = r"layer .*second.*, backward: a gradient of shape \(3, 3\), summed over"
            for tensor in (both, grad):
                with pytest.raises(tf.errors.InvalidArgumentError, match=text):
                    run(tensor)


def test_once_somebody_asks_for_gradients_of_inputs_all_others_wait_for_them():
    with tf.Graph().as_default():
        checks = checks_of("results")
        checks.backward([[tf.zeros([2]), None]], [[empty_note()]])
        (grad,) = checks.after_backward([tf.constant(8.0)], "CPU:1")
        assert run(grad) == 8.0
        # The third example is one of the second microbatch.
        bad = tf.constant([[0.0], [0.0], [NAN], [0.0]])
        checks.input_grads([bad])
        text = r"layer .*first.*, microbatch 1, backward: the gradient of input 0 is not"
        with pytest.raises(tf.errors.InvalidArgumentError, match=text):
            run(grad)
