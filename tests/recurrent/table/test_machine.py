"""One action at a time, on the device of its stage, in the order of its home."""

import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.values import GRADS, KEPT, OUTPUTS, PENDING
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import DY, ROWS, WEIGHTS, WIDTH, X, assert_close, small_machine

FIRST = tf.TensorSpec([ROWS, WIDTH])


class Values:
    """What one microbatch's actions read and write."""

    def __init__(self, state):
        self.state = state
        self.found = {(OUTPUTS, -1): [tf.constant(X[:ROWS])]}

    def read(self, kind, stage):
        return self.found[kind, stage]

    def write(self, kind, stage, value):
        self.found[kind, stage] = value


def perform(actions):
    """Values after actions of the first microbatch, such as `0F`; the machine."""
    machine, state = small_machine()
    values = Values(state)
    values.found[GRADS, 2] = [tf.constant(DY[:ROWS])]
    for action in actions:
        stage, kind = int(action[0]), action[1]
        with machine.acting(f"action_{action}0", stage):
            machine.act(kind, stage, FULL, tf.constant(0, tf.int64), values)
    return machine, values


def test_specs_and_places_of_what_actions_hand_on():
    with tf.Graph().as_default():
        machine, _ = small_machine()
        assert machine.specs(OUTPUTS, 0) == machine.specs(GRADS, 1) == [FIRST]
        assert machine.specs(KEPT, 0, FULL) == [FIRST]
        assert len(machine.specs(KEPT, 0, NONE)) == 2
        for kind in (OUTPUTS, GRADS, KEPT):
            assert machine.places(kind, 0, FULL) == machine.input_places(0) == [0], kind


def test_functions_of_a_mode_are_made_once():
    with tf.Graph().as_default():
        machine, _ = small_machine()
        assert machine.passes(0, FULL) is machine.passes(0, FULL)
        assert machine.passes(0, FULL) is not machine.passes(0, NONE)


def test_without_a_gradient_at_the_end_there_is_none_anywhere():
    with tf.Graph().as_default():
        machine, _ = small_machine(is_forward_only=True)
        assert machine.specs(GRADS, 0) == [None]
        assert machine.traced[0].gradients.of_theta == [None]


@pytest.mark.parametrize("halves", [False, True])
def test_actions_write_what_later_ones_read(halves):
    backwards = ["1I", "0I", "1W", "0W"] if halves else ["1B", "0B"]
    with tf.Graph().as_default():
        machine, values = perform(["0F", "1F", *backwards])
        sums = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        (y,), (dx,) = values.found[OUTPUTS, 1], values.found[GRADS, 0]
        assert y.device == "/device:CPU:2"
        assert ((PENDING, 0) in values.found) == halves
        found = run([y, dx, *sums])
    x = tf.constant(X[:ROWS])
    weights = [*map(tf.constant, WEIGHTS)]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        h = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]))
    assert_close(found, [h, *tape.gradient(h, [x, *weights], tf.constant(DY[:ROWS]))])


def test_an_action_waits_for_the_one_before_on_its_home_alone():
    with tf.Graph().as_default():
        _, values = perform(["0F"])
        first, second = values.state.tokens
        assert second == [[]]
        (token,) = first
        assert values.found[OUTPUTS, 0][0].op in token
        assert {op.device for op in token} == {"/device:CPU:1"}


def test_a_stage_that_has_not_gone_backward_starts_from_zeros():
    with tf.Graph().as_default():
        machine, state = small_machine()
        machine.begin(0, state)
        ((zeros,), nothing) = state.accumulators
        assert nothing is None and zeros.shape == [WIDTH, WIDTH]
        assert zeros.device == "/device:CPU:1" and not run(zeros).any()
        state.accumulators[0] = [tf.ones([WIDTH, WIDTH])]
        given = state.accumulators[0]
        machine.begin(0, state)
        assert state.accumulators[0] is given
