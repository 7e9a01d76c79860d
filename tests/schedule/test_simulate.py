"""The simulator against a slow, obvious one, with shared cores and on one clock."""

import functools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Action,
    Costs,
    Schedule,
    gpipe,
    interleaved_one_f_one_b,
    looped_bfs,
    one_f_one_b,
    recompute,
    simulate,
    validate,
)
from pipemesh.schedule.action import needs
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.simulate import lockstep, rounds


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


@settings(max_examples=30)
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


def test_simulate_rejects_what_validate_rejects():
    stuck = Schedule.from_text("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1")
    for run in (simulate, functools.partial(simulate, cores=1), rounds, lockstep):
        with pytest.raises(ScheduleError, match="deadlock: device 0, tick 1: 0B0 waits for 1B0"):
            run(stuck)


def test_64_devices_and_512_microbatches_take_less_than_a_second():
    schedule = interleaved_one_f_one_b(64, 512, 2)

    def measure():
        begin = time.process_time()
        simulate(schedule, Costs(1, 2, 1, 1, 0.1))
        return time.process_time() - begin

    # The best of three, because other work on the machine can only slow one down.
    assert any(measure() < 1.0 for _ in range(3))


TRAINING = sorted(name for name in BUILDERS if NAMES[name].trains)


def any_costs(data, stages):
    cost = st.lists(st.floats(0.01, 5), min_size=stages, max_size=stages)
    durations = [data.draw(cost) for _ in range(4)]
    return Costs(*durations, data.draw(st.floats(0, 1)), data.draw(cost))


@settings(max_examples=40)
@given(
    st.data(),
    st.sampled_from([*BUILDERS, "seq1f1b:2", "seq1f1b:4"]),
    st.integers(1, 4),
    st.booleans(),
)
def test_with_a_core_each_it_is_the_plain_simulation(data, name, devices, recomputes):
    schedule = build(name, devices, 2 * devices)
    costs = any_costs(data, schedule.num_stages)
    if recomputes and not schedule.is_forward_only:
        schedule = recompute(schedule, costs=costs)
    plain = simulate(schedule, costs)
    shared = simulate(schedule, costs, cores=devices)
    for mine, theirs in ((shared.starts, plain.starts), (shared.ends, plain.ends)):
        for row, other in zip(mine, theirs, strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(
    ("costs", "makespan"),
    [(Costs(1, 2), 15), (Costs([1, 3], [2, 6]), 39), (Costs(2, 3, transfer=1), 29)],
)
def test_slices_take_as_long_with_enough_cores(costs, makespan):
    """Codes were divided by the number of microbatches, which mixed up kinds and stages."""
    schedule = build("seq1f1b:2", 2, 2)
    assert simulate(schedule, costs).makespan == makespan
    assert simulate(schedule, costs, cores=100).makespan == makespan


@pytest.mark.parametrize("options", [{"loads": 2.0}, {"loads": {"F": 1}}, {"crowding": 0.5}])
def test_loads_without_cores_are_an_error(options):
    with pytest.raises(ScheduleError, match="cores is None; give cores, or leave them out"):
        simulate(gpipe(2, 2), **options)


@settings(max_examples=30)
@given(st.data(), st.sampled_from(TRAINING), st.integers(1, 4), st.floats(0.3, 4))
def test_work_never_exceeds_the_cores(data, name, devices, cores):
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


def test_two_actions_at_once_share_a_core():
    """One of 1 and one of 2 on one core: both at half speed until 2, then one alone until 3."""
    schedule = Schedule.from_text("0: 0F0 0F1 0B0 0B1\n1: 1F0 1F1 1B1 1B0")
    timeline = simulate(schedule, Costs([2, 1], 1, transfer=0), cores=1)
    # 0F0 alone until 2; then 0F1 (2) beside 1F0 (1): 1F0 ends at 4 with 1 left of 0F1.
    assert timeline.starts[1][0] == 2 and timeline.ends[1][0] == 4
    assert timeline.ends[0][1] == 5


def test_loads_weigh_the_contention():
    schedule = gpipe(2, 4)
    costs = Costs(forward=1, backward=2)
    # Who only waits needs no core.
    assert simulate(schedule, costs, cores=0.1, loads=0).makespan == 15
    # Backward passes use both cores, so that two of them at once take twice as long.
    both = simulate(schedule, costs, cores=2, loads={"F": 1, "B": 2}).makespan
    assert both == pytest.approx(5 + 2 * 8)
    each = simulate(schedule, costs, cores=2, loads={"F": [1, 1], "B": [2, 2]}).makespan
    assert each == both


def test_crowding_is_the_loss_of_threads_at_random():
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


SIZES = [(1, 1, 1), (1, 3, 2), (2, 1, 3), (2, 4, 1), (2, 8, 2), (4, 1, 1), (4, 3, 2), (4, 4, 3)]
SIZES += [(4, 8, 2), (5, 3, 3), (5, 4, 1), (5, 8, 2)]


def ticks_of(rows):
    return {action: tick for row in rows for tick, action in enumerate(row) if action is not None}


@pytest.mark.parametrize("name", BUILDERS)
def test_lockstep_has_every_action_once_after_its_inputs(name):
    schedule = BUILDERS[name](4, 8)
    rows = lockstep(schedule)
    assert len({len(row) for row in rows}) == 1
    assert [tuple(a for a in row if a) for row in rows] == list(schedule.rows)
    ticks = ticks_of(rows)
    split = {(a.stage, a.microbatch) for a in ticks if a.kind == "I"}
    for action, tick in ticks.items():
        assert all(ticks[n] < tick for n in needs(action, schedule.num_stages, split))


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_a_loop_sends_to_the_neighbour_at_each_tick(devices, microbatches, virtual):
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
    # The figures of the table are those of the clock.
    num_ticks = (virtual - 1) * max(microbatches, devices) + microbatches + devices - 1
    assert len(forward[0]) == num_ticks
    timeline = simulate(schedule, Costs(forward=1, backward=3))
    assert timeline.makespan == 4 * num_ticks
    assert timeline.bubble[0] == 4 * forward[0].count(None)
