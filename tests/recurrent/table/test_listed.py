"""What goes into a run whose values lie in lists, and what comes out of it."""

import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.rolled import Rolled
from pipemesh.recurrent.table.ticks.ticked import Ticked
from pipemesh.schedule import execution_order, gpipe
from pipemesh.schedule.repeats import Loop, find_loops
from tests.recurrent.passes.traced import run
from tests.recurrent.table.small import (
    CUTTING,
    DY,
    MICROBATCHES,
    MODES,
    X,
    assert_close,
    small_machine,
    wanted,
)

ORDER = execution_order(gpipe(2, MICROBATCHES))
FORMS = {"rolled": (Rolled, find_loops(ORDER, lambda action: FULL)), "ticks": (Ticked, ORDER)}


@pytest.mark.parametrize("form", FORMS)
def test_a_second_backward_pass_takes_the_same_values_once_more(form):
    make, items = FORMS[form]
    forwards = [i for i in items if (i.body[0] if isinstance(i, Loop) else i).kind == "F"]
    with tf.Graph().as_default():
        machine, state = small_machine()
        inputs = [tf.constant(X)]
        values = make(machine, state, machine.stages, inputs, CUTTING, MODES, items)
        values.perform(forwards)
        found = []
        for factor in (1.0, 2.0):
            values.seed([factor * tf.constant(DY)])
            values.state.accumulators = [None, None]
            values.perform(items[len(forwards) :])
            found += values.input_grads()
        one, two = run(found)
    of_x = wanted()[1]
    assert_close([one, two], [of_x, 2 * of_x])
