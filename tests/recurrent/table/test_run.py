"""A run says what it performs, what gradients flow to, and what it holds."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.run import loop_pays, with_loss
from pipemesh.schedule import execution_order, gpipe, interleaved_one_f_one_b, one_f_one_b
from tests.recurrent.table.small import (
    WEIGHTS,
    X,
    small_stages,
)


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
