"""Values of the loop that one action changes."""

import pytest
import tensorflow as tf

from pipemesh.recurrent.table.loop_variables import Fan
from tests.recurrent.passes.traced import run


@pytest.mark.parametrize(("number", "wanted"), [(0, 4.0), (1, 9.0), (2, 3.0), (3, 3.0)])
def test_values_go_to_that_user_whose_number_the_step_says(number, wanted):
    """User 2 does nothing with it; 3 is nobody."""
    with tf.Graph().as_default() as graph:
        fan = Fan([tf.constant(3.0), None], ["CPU:1"] * 2, [0, 0], lambda _: tf.constant(number), 3)
        (first, none), (second, _) = fan.to(0), fan.to(1)
        assert none is None
        fan.leave(0, [first + 1, None])
        fan.leave(1, [3 * second, None])
        (found, _) = fan.merged()
        assert run(found) == wanted
        assert [op.type for op in graph.get_operations()].count("_SwitchN") == 1
        with pytest.raises(tf.errors.InvalidArgumentError, match="Retval"):
            run([fan.to(user)[0] for user in range(4) if user != number])
