"""Each action has operations of its own; values wait under their microbatch's number."""

import tensorflow as tf

from pipemesh.recurrent.table.action_by_action import ActionByAction
from pipemesh.recurrent.table.values import GRADS, OUTPUTS
from pipemesh.schedule import execution_order
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


def action_by_action(machine, state):
    return ActionByAction(machine, state, machine.stages, [tf.constant(X)], CUTTING, MODES)


def test_actions_give_outputs_and_gradients_of_the_whole_batch():
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = action_by_action(machine, state)
        values.seed([tf.constant(DY)])
        values.perform(execution_order(SCHEDULE))
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        results = [*values.outputs(), *values.input_grads(), *weights]
        names = {op.name.split("/")[0] for op in graph.get_operations()}
        found = run([results, [carry[0] for carry in values.state.carries]])
    assert_close(found[0], wanted())
    assert found[1] == [MICROBATCHES] * 2
    actions = {f"action_{action}" for action in execution_order(SCHEDULE)}
    assert {name for name in names if name.startswith("action")} == actions


def test_all_microbatches_may_have_the_same_gradient():
    with tf.Graph().as_default():
        values = action_by_action(*small_machine())
        values.seed_all([one := tf.ones([])])
        assert values.read(GRADS, 2) == [one]


def test_the_first_stage_reads_its_part_of_the_inputs():
    with tf.Graph().as_default():
        values = action_by_action(*small_machine())
        (part,) = values.read(OUTPUTS, -1)
        assert_close([run(part)], [X[: CUTTING.part_size]])
