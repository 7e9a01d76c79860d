"""A run says what it performs, what gradients flow to, and what it holds."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError, ScheduleError
from pipemesh.recurrent import Options
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.machine import GRADS, OUTPUTS
from pipemesh.recurrent.table.run import ActionByAction, Run, loop_pays, with_loss
from pipemesh.schedule import execution_order, gpipe, interleaved_one_f_one_b, one_f_one_b
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import (
    CUTTING,
    DY,
    MICROBATCHES,
    MODES,
    SCHEDULE,
    WEIGHTS,
    X,
    assert_close,
    small_machine,
    small_stages,
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


def run_of(schedule, **options):
    return Run(small_stages(), [tf.constant(X)], schedule, None, Options(**options))


def test_eagerly_there_is_no_graph_to_be_part_of():
    with pytest.raises(PipelineError, match=r"call it inside a tf\.function"):
        run_of(gpipe(2, MICROBATCHES))


def test_a_schedule_of_other_stages_is_an_error():
    with (
        tf.Graph().as_default(),
        pytest.raises(ScheduleError, match="has 3 stages, but 2 were given"),
    ):
        run_of(gpipe(3, MICROBATCHES))


def test_phases_are_what_comes_before_the_loss_and_after_it():
    schedule = gpipe(2, MICROBATCHES)
    with tf.Graph().as_default():
        forwards, backwards = run_of(schedule).phases()
        assert [*forwards, *backwards] == [*execution_order(schedule)]
        assert {action.kind for action in forwards} == {"F"}
        assert {action.kind for action in backwards} == {"B"}
        with pytest.raises(ScheduleError, match="follows a backward action"):
            run_of(one_f_one_b(2, MICROBATCHES)).phases()


@pytest.mark.parametrize("loop", [False, True])
def test_a_run_is_a_loop_if_requested(loop):
    with tf.Graph().as_default() as graph:
        run = run_of(gpipe(2, MICROBATCHES), loop=loop)
        run.perform(run.phases()[0])
        assert any("While" in op.type for op in graph.get_operations()) == loop


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


def test_gradients_flow_to_inputs_and_weights_on_their_devices():
    with tf.Graph().as_default():
        run = run_of(gpipe(2, MICROBATCHES))
        assert [source.device for source in run.sources] == ["CPU:1", "CPU:1", "CPU:2"]
        assert [[*t.shape] for source in run.sources for t in source.tensors] == [
            [*X.shape],
            [*WEIGHTS[0].shape],
            [*WEIGHTS[1].shape],
        ]
        assert run.last_specs == [tf.TensorSpec([2, 3])]


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
