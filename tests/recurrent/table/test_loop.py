"""One loop gives the results of the whole batch."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.action_by_action import ActionByAction
from pipemesh.recurrent.table.loop import Loop
from pipemesh.schedule import execution_order, gpipe
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import (
    CUTTING,
    DY,
    MICROBATCHES,
    MODES,
    SCHEDULE,
    X,
    assert_close,
    small_machine,
    wanted,
)


def results_of(schedule, make, modes=MODES):
    """Outputs, gradients and carries; `make` makes what performs the actions."""
    order = execution_order(schedule)
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = make(machine, state, machine.stages, [tf.constant(X)], CUTTING, modes, order)
        values.seed([tf.constant(DY)])
        values.perform(order)
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        carries = [carry[0] for carry in values.state.carries]
        found = run(
            [[*values.outputs(), *values.input_grads(), *weights], carries], optimizes=False
        )
        return found, [op.type for op in graph.get_operations()]


def action_by_action(machine, state, stages, inputs, cutting, modes, order):
    return ActionByAction(machine, state, stages, inputs, cutting, modes)


@pytest.mark.parametrize("schedule", [SCHEDULE, gpipe(2, MICROBATCHES)], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("remat", ["full", "both"])
def test_outputs_and_gradients_are_those_of_the_whole_batch(schedule, remat):
    modes = {key: NONE if remat == "both" and key[1] % 2 else FULL for key in MODES}
    (results, carries), operations = results_of(schedule, Loop, modes)
    assert sum("While" in kind for kind in operations) == 1
    (expected, _), _ = results_of(schedule, action_by_action, modes)
    for one, other in zip(results, expected, strict=True):
        np.testing.assert_array_equal(one, other)
    assert_close(results, wanted())
    assert carries == [MICROBATCHES] * 2


ORDER = execution_order(gpipe(2, MICROBATCHES))


@pytest.mark.parametrize("make", [Loop, lambda *arguments: ActionByAction(*arguments[:-1])])
def test_a_second_backward_pass_takes_the_same_values(make):
    forwards = [action for action in ORDER if action.kind == "F"]
    with tf.Graph().as_default():
        machine, state = small_machine()
        inputs = [tf.constant(X)]
        values = make(machine, state, machine.stages, inputs, CUTTING, MODES, ORDER)
        values.perform(forwards)
        found = []
        for factor in (1.0, 2.0):
            values.seed([factor * tf.constant(DY)])
            values.state.accumulators = [None, None]
            values.perform(ORDER[len(forwards) :])
            found += values.input_grads()
        one, two = run(found)
    of_x = wanted()[1]
    assert_close([one, two], [of_x, 2 * of_x])
