"""Actions on one clock: what runs in a loop whose turns are ticks."""

import itertools

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, Costs, Schedule, looped_bfs, simulate, validate, zb_h1
from pipemesh.schedule.action import needs
from pipemesh.schedule.builders.registry import BUILDERS
from pipemesh.schedule.simulate import lockstep

SIZES = list(itertools.product((1, 2, 4, 5), (1, 3, 4, 8), (1, 2, 3)))


def ticks_of(rows):
    return {action: tick for row in rows for tick, action in enumerate(row) if action is not None}


@pytest.mark.parametrize("name", BUILDERS)
def test_every_action_is_there_once_and_after_what_it_needs(name):
    schedule = BUILDERS[name].function(4, 8)
    rows = lockstep(schedule)
    assert len({len(row) for row in rows}) == 1
    assert [tuple(a for a in row if a) for row in rows] == list(schedule.rows)
    ticks = ticks_of(rows)
    split = {(a.stage, a.microbatch) for a in ticks if a.kind == "I"}
    for action, tick in ticks.items():
        assert all(ticks[n] < tick for n in needs(action, schedule.num_stages, split))


def test_both_halves_of_a_backward_pass_take_a_tick_each():
    assert [str(action) for action in lockstep(zb_h1(1, 1))[0]] == ["0F0", "0I0", "0W0"]


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_a_loop_of_alike_stages_sends_to_the_neighbour_at_each_tick(devices, microbatches, virtual):
    """So what a device gets is what its neighbour made one tick before, or waits in a slot."""
    schedule = validate(looped_bfs(devices, microbatches, virtual))
    rows = lockstep(schedule.only_forward())
    ticks = ticks_of(rows)
    read_by = {a: t for a, t in ticks.items() if a.stage % devices == 0}
    for action, tick in ticks.items():
        if action.stage % devices:
            assert ticks[Action(action.stage - 1, "F", action.microbatch)] == tick - 1
        elif action.stage:
            assert ticks[Action(action.stage - 1, "F", action.microbatch)] < tick
    for action, tick in ticks.items():
        if (action.stage + 1) % devices == 0:
            # Its slot on the first device was read for this round, and not yet for the next.
            before = Action(action.stage + 1 - devices, "F", action.microbatch)
            behind = Action(action.stage + 1, "F", action.microbatch)
            assert read_by[before] <= tick < read_by.get(behind, len(rows[0]))


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_backward_the_ticks_are_the_same_in_the_reverse_order(devices, microbatches, virtual):
    schedule = looped_bfs(devices, microbatches, virtual)
    forward = lockstep(schedule.only_forward())
    backward = [
        tuple(a and Action(a.stage, "B", a.microbatch) for a in reversed(row)) for row in forward
    ]
    assert lockstep(schedule) == tuple(a + b for a, b in zip(forward, backward, strict=True))


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_the_figures_of_the_table_are_those_of_the_clock(devices, microbatches, virtual):
    schedule = looped_bfs(devices, microbatches, virtual)
    rows = lockstep(schedule.only_forward())
    num_ticks = (virtual - 1) * max(microbatches, devices) + microbatches + devices - 1
    assert len(rows[0]) == num_ticks
    timeline = simulate(schedule, Costs(forward=1, backward=3))
    assert timeline.makespan == 4 * num_ticks
    idle = sum(action is None for action in rows[0])
    assert timeline.bubble[0] == 4 * idle


def test_a_schedule_that_is_not_valid_has_no_clock():
    with pytest.raises(ScheduleError, match="never does 0B0"):
        lockstep(Schedule.from_text("0F0 0F1 0B1"))
