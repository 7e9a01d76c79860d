"""The simulator against a slow, obvious one, and its speed."""

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, Schedule, gpipe, interleaved_one_f_one_b, simulate, zb_h1
from pipemesh.schedule.action import needs
from pipemesh.schedule.builders import BUILDERS, build


def obvious(schedule, costs):
    """Start times by repeated relaxation until nothing changes."""
    stage = costs.per_stage(schedule.num_stages)
    duration = stage.durations()
    split = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "I"}
    homes = schedule.stage_devices
    start = {action: 0.0 for row in schedule.rows for action in row}
    changed = True
    while changed:
        changed = False
        for row in schedule.rows:
            ready = 0.0
            for action in row:
                time_ = ready
                for source in needs(action, schedule.num_stages, split):
                    lag = 0.0
                    if homes[source.stage] != homes[action.stage]:
                        lag = stage.transfer[min(source.stage, action.stage)]
                    time_ = max(time_, start[source] + duration[source.kind][source.stage] + lag)
                changed |= time_ > start[action]
                start[action] = max(start[action], time_)
                ready = start[action] + duration[action.kind][action.stage]
    return start


cost = st.integers(0, 8)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(1, 2))
def test_start_times_are_those_of_the_obvious_simulation(data, name, num_devices, factor):
    schedule = build(name, num_devices, 2 * factor * num_devices)
    values = st.one_of(
        cost, st.lists(cost, min_size=schedule.num_stages, max_size=schedule.num_stages)
    )
    costs = Costs(*(data.draw(values) for _ in range(5)))
    expected = obvious(schedule, costs)
    timeline = simulate(schedule, costs)
    assert {span.action: span.start for span in timeline.spans()} == expected
    assert sum(timeline.busy) + timeline.total_bubble == pytest.approx(
        timeline.makespan * num_devices
    )


def test_a_slow_last_stage_and_transfers_by_hand():
    timeline = simulate(gpipe(2, 2), Costs(forward=[1, 3], backward=[2, 4], transfer=[0.5, 99]))
    assert timeline.starts == ((0, 1, 12.0, 16.0), (1.5, 4.5, 7.5, 11.5))
    assert timeline.makespan == 18.0


def test_transfers_within_a_device_are_free():
    turn = Schedule.from_text("0: 0F0 1F0 1B0 0B0")
    assert simulate(turn, Costs(transfer=100)).makespan == 6


def test_jitter_is_seeded_and_bounded():
    schedule, costs = gpipe(3, 4), Costs(1, 2)
    one, same, other = (simulate(schedule, costs, jitter=0.3, seed=s) for s in (1, 1, 2))
    assert one == same != other
    assert simulate(schedule, costs, jitter=0.0, seed=5) == simulate(schedule, costs)
    for span in one.spans():
        mean = 1 if span.action.kind == "F" else 2
        assert 0.7 * mean <= span.end - span.start + 1e-9
        assert span.end - span.start <= 1.3 * mean + 1e-9


@pytest.mark.parametrize("jitter", [-0.1, 1.1, float("nan")])
def test_jitter_out_of_range_is_an_error(jitter):
    with pytest.raises(ScheduleError, match="jitter is"):
        simulate(gpipe(1, 1), jitter=jitter)


def test_simulate_rejects_what_validate_rejects():
    with pytest.raises(ScheduleError, match="deadlock: device 0, tick 1: 0B0 waits for 1B0"):
        simulate(Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"))


@pytest.mark.parametrize(
    "schedule",
    [gpipe(64, 512), zb_h1(64, 512), interleaved_one_f_one_b(64, 512, 2)],
    ids=["gpipe", "zb_h1", "interleaved"],
)
def test_64_devices_and_512_microbatches_take_less_than_a_second(schedule):
    def measure():
        begin = time.process_time()
        simulate(schedule, Costs(1, 2, 1, 1, 0.1))
        return time.process_time() - begin

    # The best of three, because other work on the machine can only slow one down.
    assert min(measure() for _ in range(3)) < 1.0
