"""The values that actions take and give, and actions as text."""

import pytest
from hypothesis import assume, given

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, execution_order
from pipemesh.schedule.action import EFFECTS, GRADS, KEPT, OUTPUTS, needs
from tests.schedule.random_schedules import inputs_of, schedules


@given(schedules)
def test_every_value_is_made_before_it_is_taken_and_taken_once(schedule):
    """What is left at the end comes out of the pipeline, or was kept for no backward pass."""
    pieces, stages = range(schedule.num_pieces), schedule.num_stages
    values = {(OUTPUTS, -1, piece) for piece in pieces}
    values |= {(GRADS, stages, piece) for piece in pieces}
    recomputed = schedule.recomputed()
    for action in execution_order(schedule):
        stage, piece, effect = action.stage, schedule.piece(action), EFFECTS[action.kind]
        for value, step in effect.taken((stage, piece) in recomputed):
            values.remove((value, stage + step, piece))
        for value, step in effect.gives:
            assert (value, stage + step, piece) not in values
            values.add((value, stage + step, piece))
    expected = {(OUTPUTS, stages - 1, piece) for piece in pieces}
    if schedule.is_forward_only:
        expected |= {(KEPT, stage, piece) for stage in range(stages) for piece in pieces}
        expected |= {(GRADS, stages, piece) for piece in pieces}
    else:
        expected |= {(GRADS, 0, piece) for piece in pieces}
    assert values == expected


@given(schedules)
def test_an_action_needs_its_inputs(schedule):
    inputs = inputs_of(schedule)
    # Of one microbatch all slices are split, or none.
    assume(schedule.num_slices == 1 or "I" not in str(schedule))
    split = {(a.stage, a.microbatch) for a in inputs if a.kind == "I"}
    for action, wanted in inputs.items():
        found = needs(action, schedule.num_stages, split, schedule.num_slices)
        assert set(found) == {needed for needed in wanted if needed.kind != "R"}


@pytest.mark.parametrize(
    ("text", "column"),
    [
        *(("", 1), ("2F", 3), ("F0", 1), ("2X0", 2), ("2F0 ", 4), ("-1F0", 1), ("12F3B", 5)),
        *(("٣F0", 1), ("2F0.", 5), ("2F0.x", 5), ("2F0,1", 4), ("2F.1", 3)),
    ],
)
def test_malformed_action_text_points_at_the_column(text, column):
    with pytest.raises(ScheduleError, match=f"^column {column}: .* is not an action") as info:
        Action.from_text(text)
    assert repr(text) in str(info.value)


def test_a_slice_is_written_behind_a_point():
    assert Action.from_text("12F34.5") == Action(12, "F", 34, 5)
    assert str(Action(12, "R", 3, 0)) == "12R3.0"
