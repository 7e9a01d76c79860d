"""The constraints, asked directly: rows that keep them, and a bound in ticks."""

from pipemesh.schedule import (
    Costs,
    Schedule,
    exact_process,
    gpipe,
    list_schedule,
    simulate,
    validate,
    zb_v,
)
from tests.schedule.test_optimal import with_solver

pytestmark = with_solver


def answer(start, costs, limits, seconds=30):
    ticks = costs.per_stage(start.num_stages)
    whole = type(ticks)(*(tuple(map(int, values)) for values in vars(ticks).values()))
    rows, bound = exact_process.answer(whole, start, tuple(limits), seconds, workers=4)
    if rows is None:
        return None, bound
    schedule = validate(Schedule(rows, start.stage_devices, start.num_microbatches))
    return simulate(schedule, costs), bound


def test_what_is_optimal_stays_as_long_as_it_is():
    timeline, bound = answer(zb_v(2, 3), Costs(), [12, 12])
    assert timeline.makespan == bound == simulate(zb_v(2, 3)).makespan


def test_microbatches_pass_every_stage_in_order():
    timeline, _ = answer(gpipe(3, 4), Costs(2, 5, 2, 3), [4, 4, 4])
    for row in timeline.schedule.rows:
        for kind in "FIW":
            done = [action.microbatch for action in row if action.kind == kind]
            assert done == sorted(done)


def test_a_backward_stays_whole_where_that_is_shorter():
    timeline, bound = answer(gpipe(1, 3), Costs(2, 4, 3, 3), [3])
    assert {action.kind for action in timeline.schedule.rows[0]} == {"F", "B"}
    assert timeline.makespan == bound == 3 * (2 + 4)


def test_transfers_count_between_devices_only():
    assert answer(gpipe(2, 1), Costs(1, transfer=3), [1, 1])[1] == 5 + 6
    near = Schedule.from_text("0F0 1F0 1B0 0B0")
    assert answer(near, Costs(1, transfer=3), [2])[1] == 6


def test_no_time_gives_the_bound_alone():
    start = list_schedule(Costs(), 4, 8, 2)
    _, bound = answer(start, Costs(), [2, 2, 2, 2], seconds=1e-6)
    assert bound == 37
