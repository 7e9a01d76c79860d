"""Repeating actions are a loop of the graph and give the same."""

import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.kinds import GRADS, KEPT, OUTPUTS
from pipemesh.recurrent.table.rolled import Rolled
from pipemesh.schedule import execution_order, gpipe
from pipemesh.schedule.repeats import Loop, find_loops
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


def rolled(machine, state, items):
    return Rolled(machine, state, machine.stages, [tf.constant(X)], CUTTING, MODES, items)


@pytest.mark.parametrize("schedule", [SCHEDULE, gpipe(2, MICROBATCHES)], ids=["1f1b", "gpipe"])
def test_loops_give_outputs_and_gradients_of_the_whole_batch(schedule):
    items = find_loops(execution_order(schedule), lambda action: FULL)
    assert any(isinstance(item, Loop) for item in items)
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = rolled(machine, state, items)
        values.seed([tf.constant(DY)])
        values.perform(items)
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        results = [*values.outputs(), *values.input_grads(), *weights]
        assert any("While" in op.type for op in graph.get_operations())
        found = run([results, [carry[0] for carry in values.state.carries]])
    assert_close(found[0], wanted())
    assert found[1] == [MICROBATCHES] * 2


def test_what_goes_around_in_one_loop_lies_in_no_list():
    """In 1F1B's steady state values move up; in GPipe all of them exist at once."""
    channels = {}
    for name, schedule in [("1f1b", SCHEDULE), ("gpipe", gpipe(2, MICROBATCHES))]:
        items = find_loops(execution_order(schedule), lambda action: FULL)
        with tf.Graph().as_default():
            channels[name] = rolled(*small_machine(), items).in_lists
    # What leaves the pipeline is taken by no action.
    leaving = {(OUTPUTS, 1), (GRADS, 0)}
    assert leaving <= channels["1f1b"] and (KEPT, 1) not in channels["1f1b"]
    assert {(KEPT, 0), (KEPT, 1)} | leaving <= channels["gpipe"]


def test_microbatches_of_a_loop_may_differ_in_what_is_computed_again():
    modes = {(s, m): (FULL, NONE)[m % 2] for s, m in MODES}
    order = execution_order(gpipe(2, MICROBATCHES))
    items = find_loops(order, lambda action: modes[action.stage, action.microbatch])
    assert any(isinstance(item, Loop) and abs(item.shift) == 2 for item in items)
    with tf.Graph().as_default():
        machine, state = small_machine()
        values = Rolled(machine, state, machine.stages, [tf.constant(X)], CUTTING, modes, items)
        values.seed([tf.constant(DY)])
        values.perform(items)
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        found = run([*values.outputs(), *values.input_grads(), *weights])
    assert_close(found, wanted())
