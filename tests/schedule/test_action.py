"""Actions as text, and the values that they take and give."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, build, execution_order, recompute
from pipemesh.schedule.action import EFFECTS, GRADS, KEPT, KINDS, OUTPUTS, makers
from pipemesh.schedule.builders import BUILDERS, SLICED


@given(st.integers(0, 99), st.sampled_from(KINDS), st.integers(0, 99))
def test_action_text_parses_back(stage, kind, microbatch):
    action = Action(stage, kind, microbatch)
    assert Action.from_text(str(action)) == action


@pytest.mark.parametrize(
    ("text", "column"),
    [("", 1), ("2F", 3), ("F0", 1), ("2X0", 2), ("2F0 ", 4), ("-1F0", 1), ("12F3B", 5), ("٣F0", 1)],
)
def test_malformed_action_text_points_at_the_column(text, column):
    with pytest.raises(ScheduleError, match=f"^column {column}: .* is not an action") as info:
        Action.from_text(text)
    assert repr(text) in str(info.value)


@pytest.mark.parametrize("fields", [(0, "X", 0), (0, "FB", 0), (-1, "F", 0), (0, "F", -1)])
def test_impossible_actions_cannot_be_made(fields):
    with pytest.raises(ScheduleError):
        Action(*fields)


SCHEDULES = {
    **{name: build(name, 2, 4) for name in BUILDERS | SLICED},
    **{f"{name} with R": recompute(build(name, 2, 4)) for name in ("1f1b", "zb_v", "seq1f1b:2")},
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_value_is_made_before_it_is_taken_and_taken_once(name):
    """What is left at the end comes out of the pipeline, or was kept for no backward pass."""
    schedule = SCHEDULES[name]
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


def test_every_taken_value_has_a_maker():
    assert [makers(name) for name in (OUTPUTS, KEPT, GRADS)] == ["F", "F", "BI"]
    assert set(EFFECTS) == set(KINDS)
    for effect in EFFECTS.values():
        assert all(makers(name) for name, _ in effect.takes)
        # The simulator waits for one neighbour of an action.
        assert len([value for value in effect.takes if value.step]) <= 1
