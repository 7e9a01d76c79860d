"""A run says what it performs, what gradients flow to, and what it holds."""

import pytest

from pipemesh.recurrent import Stage
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.run import loop_pays, place
from pipemesh.schedule import execution_order, gpipe, interleaved_one_f_one_b, one_f_one_b


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
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    assert loop_pays(order, modes, nodes_of_action * len(order)) == is_loop


def test_a_place_names_stage_device_and_layers():
    stage = Stage("s", None, [], [], ("CPU:1", "CPU:2"))
    assert place(stage, ("a", "b"), "rest", 1) == "stage 's' (CPU:2), layer 'a' or 'b', rest"
    assert place(stage, (), "rest") == "stage 's' (CPU:1), rest"
    assert place(Stage("s", None, [], [], ""), (), "rest") == "stage 's', rest"
