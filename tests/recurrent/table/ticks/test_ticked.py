"""One loop over ticks gives what loops over the steady state give, bit by bit."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL, NONE
from pipemesh.recurrent.table.rolled import Rolled
from pipemesh.recurrent.table.ticks.ticked import Ticked
from pipemesh.schedule import execution_order, gpipe
from pipemesh.schedule.repeats import find_loops
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


def results(schedule, make, modes=MODES):
    """Outputs, gradients and carries; `make` makes what performs the actions."""
    order = execution_order(schedule)
    with tf.Graph().as_default() as graph:
        machine, state = small_machine()
        values = make(machine, state, machine.stages, [tf.constant(X)], CUTTING, modes, order)
        values.seed([tf.constant(DY)])
        values.perform(order)
        weights = [machine.total_gradients(s, values.state)[0] for s in range(2)]
        carries = [carry[0] for carry in values.state.carries]
        found = run([[*values.outputs(), *values.input_grads(), *weights], carries])
        return found, [op.type for op in graph.get_operations()]


def rolled(machine, state, stages, inputs, cutting, modes, order):
    items = find_loops(order, lambda action: modes[action.stage, action.microbatch])
    found = Rolled(machine, state, stages, inputs, cutting, modes, items)
    # What is performed is its own items.
    perform = found.perform
    found.perform = lambda _: perform(items)
    return found


@pytest.mark.parametrize("schedule", [SCHEDULE, gpipe(2, MICROBATCHES)], ids=["1f1b", "gpipe"])
@pytest.mark.parametrize("remat", ["full", "both"])
def test_outputs_and_gradients_are_bit_by_bit_those_of_loops(schedule, remat):
    modes = {key: NONE if remat == "both" and key[1] % 2 else FULL for key in MODES}
    (found, carries), operations = results(schedule, Ticked, modes)
    assert sum("While" in kind for kind in operations) == 1
    if remat == "full":
        # With modes in turn, loops leave single actions, which TensorFlow compiles otherwise.
        (expected, _), _ = results(schedule, rolled, modes)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_array_equal(one, other)
    assert_close(found, wanted())
    assert carries == [MICROBATCHES] * 2
