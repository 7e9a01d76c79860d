"""Every action has operations of its own; values wait under their microbatch's number."""

import numpy as np
import tensorflow as tf

from pipemesh.recurrent.passes.cutting import Cutting
from pipemesh.recurrent.table.kinds import GRADS, OUTPUTS
from pipemesh.recurrent.table.unrolled import Unrolled, join
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


def unrolled(machine, state):
    return Unrolled(machine, state, machine.stages, [tf.constant(X)], CUTTING, MODES)


def test_actions_give_outputs_and_gradients_of_the_whole_batch():
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = unrolled(machine, state)
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
        values = unrolled(*small_machine())
        values.seed_all([one := tf.ones([])])
        assert values.read(GRADS, 2) == [one]


def test_the_first_stage_reads_its_part_of_the_inputs():
    with tf.Graph().as_default():
        values = unrolled(*small_machine())
        (part,) = values.read(OUTPUTS, -1)
        assert_close([run(part)], [X[: CUTTING.part_size]])


def test_parts_are_joined_along_the_batch_and_scalars_to_a_vector():
    parts = [tf.constant([[1, 2]]), tf.constant([[3, 4]])]
    first, second = Cutting(2, 1, 0), Cutting(2, 2, 1)
    np.testing.assert_array_equal(join(parts, first), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(join(parts, second), [[1, 2, 3, 4]])
    np.testing.assert_array_equal(join([tf.constant(1), tf.constant(2)], first), [1, 2])
    np.testing.assert_array_equal(join([tf.constant(1)], Cutting(1, 1, 0)), [1])
    assert join(parts[:1], Cutting(1, 1, 0)) is parts[0]


def test_slices_are_joined_to_sequences_replica_by_replica():
    cutting = Cutting(2, 2, 0, 2, 2, 3, 1)
    whole = np.arange(4 * 6).reshape([4, 6])
    parts = [
        tf.constant(whole[2 * m + r : 2 * m + r + 1, 3 * q : 3 * q + 3])
        for m in range(2)
        for q in range(2)
        for r in range(2)
    ]
    np.testing.assert_array_equal(join(parts, cutting), whole)
    # What every slice was given as a whole gets the sum of their gradients.
    np.testing.assert_array_equal(
        join([tf.constant([float(i)]) for i in range(8)], cutting), [2, 4, 10, 12]
    )
