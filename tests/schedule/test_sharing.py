"""Devices that share cores: processor sharing, where it is known."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, Schedule, gpipe, one_f_one_b, simulate
from pipemesh.schedule.builders import BUILDERS, build

TRAINING = sorted(name for name, builder in BUILDERS.items() if builder.trains)


def any_costs(data, stages):
    cost = st.lists(st.floats(0.01, 5), min_size=stages, max_size=stages)
    return Costs(*(data.draw(cost) for _ in range(4)), data.draw(st.floats(0, 1)))


@settings(max_examples=60)
@given(st.data(), st.sampled_from([*TRAINING, "seq1f1b:2", "seq1f1b:4"]), st.integers(1, 4))
def test_with_a_core_each_it_is_the_plain_simulation(data, name, devices):
    schedule = build(name, devices, 2 * devices)
    costs = any_costs(data, schedule.num_stages)
    plain = simulate(schedule, costs)
    shared = simulate(schedule, costs, cores=devices)
    for mine, theirs in ((shared.starts, plain.starts), (shared.ends, plain.ends)):
        for row, other in zip(mine, theirs, strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-9)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(TRAINING), st.integers(1, 4), st.floats(0.3, 4))
def test_cores_are_never_more_than_there_are(data, name, devices, cores):
    schedule = build(name, devices, 2 * devices)
    costs = any_costs(data, schedule.num_stages)
    timeline = simulate(schedule, costs, cores=cores)
    plain = simulate(schedule, costs)
    work = sum(plain.busy)
    assert timeline.makespan >= work / cores * (1 - 1e-9)
    assert timeline.makespan >= plain.makespan * (1 - 1e-9)
    # At no time nobody computes, but for transfers.
    lone = Costs(*(getattr(costs, f) for f in ("forward", "backward", "input_grad", "weight_grad")))
    busy = simulate(schedule, lone, cores=min(cores, 1.0))
    assert busy.makespan == pytest.approx(work / min(cores, 1.0))


def test_two_that_run_at_once_take_what_is_left():
    """One of 1 and one of 2 on one core: both at half speed until 2, then one alone until 3."""
    schedule = Schedule.from_text("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B1 1B0")
    timeline = simulate(schedule, Costs([2, 1], 1, transfer=0), cores=1)
    # 0F0 alone until 2; then 0F1 (2) beside 1F0 (1): 1F0 ends at 4 with 1 left of 0F1.
    assert timeline.starts[1][0] == 2 and timeline.ends[1][0] == 4
    assert timeline.ends[0][1] == 5


def test_loads_say_who_slows_whom():
    schedule = gpipe(2, 4)
    costs = Costs(forward=1, backward=2)
    # Who only waits needs no core.
    assert simulate(schedule, costs, cores=0.1, loads=0).makespan == 15
    # Backward passes use both cores, so that two of them at once take twice as long.
    both = simulate(schedule, costs, cores=2, loads={"F": 1, "B": 2}).makespan
    assert both == pytest.approx(5 + 2 * 8)
    each = simulate(schedule, costs, cores=2, loads={"F": [1, 1], "B": [2, 2]}).makespan
    assert each == both


def test_what_devices_lose_to_each_other_is_that_of_threads_on_cores_at_random():
    """Two threads on two cores share one of them half of the time: 1.5 are busy, not 2."""
    costs = Costs(forward=1, backward=2)
    two = gpipe(2, 2)
    crowded = simulate(two, costs, cores=2, crowding=1)
    # 0F0 alone, then 0F1 beside 1F0 at three quarters, then 1F1 alone.
    assert crowded.ends[1][:2] == pytest.approx((1 + 4 / 3, 2 + 4 / 3))
    half = simulate(two, costs, cores=2, crowding=0.5)
    assert half.ends[1][0] == pytest.approx(1 + 8 / 7)
    # What a device computes alone was measured so, on however few cores.
    alone = simulate(gpipe(1, 3), costs, cores=2, loads=1.5, crowding=1)
    assert alone.makespan == simulate(gpipe(1, 3), costs).makespan
    one = simulate(two, costs, cores=0.5, crowding=1)
    assert one.makespan == simulate(two, costs, cores=0.5).makespan
    for crowding in (-0.1, 1.1, float("nan")):
        with pytest.raises(ScheduleError, match="crowding is"):
            simulate(two, costs, cores=2, crowding=crowding)


@given(st.floats(1.1, 64), st.floats(0.1, 1))
def test_many_threads_keep_all_cores_busy(cores, crowding):
    schedule, loads = gpipe(2, 4), 40 * cores
    fair = simulate(schedule, cores=cores, loads=loads)
    crowded = simulate(schedule, cores=cores, loads=loads, crowding=crowding)
    assert crowded.makespan == pytest.approx(fair.makespan, rel=1e-6)


def test_transfers_take_no_core():
    costs = Costs(1, 2, transfer=3)
    assert simulate(one_f_one_b(2, 1), costs, cores=1).makespan == 12


@pytest.mark.parametrize(
    "options",
    [
        {"cores": 0},
        {"cores": float("inf")},
        {"cores": 1, "loads": -1.0},
        {"cores": 1, "loads": {"F": [1.0]}},
    ],
)
def test_numbers_have_to_be_cores(options):
    with pytest.raises(ScheduleError):
        simulate(gpipe(2, 2), **options)


def test_a_circle_is_found():
    stuck = Schedule.from_text("0: 0F0 0B0 0F1 0B1\n1: 1F1 1B1 1F0 1B0")
    with pytest.raises(ScheduleError):
        simulate(stuck, cores=1)
