"""The simulator against a slow, obvious one, with shared cores and on one clock."""

import functools
import itertools
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
    simulate,
    validate,
)
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.simulate import lockstep, rounds
from tests.schedule.random_schedules import costs_for, inputs_of, schedules


def obvious(schedule, costs):
    """Start times by repeated relaxation until nothing changes."""
    stage = costs.per_stage(schedule.num_stages)
    duration = stage.durations()
    inputs, homes = inputs_of(schedule), schedule.stage_devices
    start = dict.fromkeys(inputs, 0.0)
    changed = True
    while changed:
        changed = False
        for row in schedule.rows:
            ready = 0.0
            for action in row:
                for source in inputs[action]:
                    arrival = start[source] + duration[source.kind][source.stage]
                    if homes[source.stage] != homes[action.stage]:
                        arrival += stage.transfer[min(source.stage, action.stage)]
                    ready = max(ready, arrival)
                changed |= ready > start[action]
                start[action] = max(start[action], ready)
                ready = start[action] + duration[action.kind][action.stage]
    return start


@given(st.data(), schedules)
def test_start_times_are_those_of_the_obvious_simulation(data, schedule):
    costs = data.draw(costs_for(schedule))
    timeline = simulate(schedule, costs)
    assert {span.action: span.start for span in timeline.spans()} == obvious(schedule, costs)
    total = timeline.makespan * schedule.num_devices
    assert sum(timeline.busy) + timeline.total_bubble == pytest.approx(total)
    assert timeline.bubble_ratio == pytest.approx(timeline.total_bubble / (total or 1))


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


def any_costs(data, stages):
    cost = st.lists(st.floats(0.01, 5), min_size=stages, max_size=stages)
    durations = [data.draw(cost) for _ in range(4)]
    return Costs(*durations, data.draw(st.floats(0, 1)), data.draw(cost))


@settings(max_examples=60)
@given(st.data(), schedules)
def test_with_a_core_each_it_is_the_plain_simulation(data, schedule):
    """Codes of slices were divided by the number of microbatches, which mixed up stages."""
    costs = any_costs(data, schedule.num_stages)
    plain = simulate(schedule, costs)
    shared = simulate(schedule, costs, cores=schedule.num_devices)
    for mine, theirs in ((shared.starts, plain.starts), (shared.ends, plain.ends)):
        for row, other in zip(mine, theirs, strict=True):
            assert row == pytest.approx(other, rel=1e-9, abs=1e-9)


@settings(max_examples=30)
@given(
    st.data(),
    st.sampled_from(sorted(name for name in BUILDERS if NAMES[name].trains)),
    st.integers(1, 4),
    st.floats(0.3, 4),
)
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


@pytest.mark.parametrize(
    ("schedule", "costs", "options", "makespan"),
    [
        # Transfers, and actions that only wait, need no core.
        (one_f_one_b(2, 1), Costs(1, 2, transfer=3), {"cores": 1}, 12),
        (gpipe(2, 4), Costs(1, 2), {"cores": 0.1, "loads": 0}, 15),
        # Backward passes use both cores, so that two of them at once take twice as long.
        (gpipe(2, 4), Costs(1, 2), {"cores": 2, "loads": {"F": 1, "B": 2}}, 5 + 2 * 8),
        (gpipe(2, 4), Costs(1, 2), {"cores": 2, "loads": {"F": [1, 1], "B": [2, 2]}}, 5 + 2 * 8),
        # What a device computes alone was measured so, on however few cores.
        (gpipe(1, 3), Costs(1, 2), {"cores": 2, "loads": 1.5, "crowding": 1}, 9),
        (gpipe(2, 2), Costs(1, 2), {"cores": 0.5, "crowding": 1}, 24),
    ],
)
def test_loads_weigh_the_contention(schedule, costs, options, makespan):
    assert simulate(schedule, costs, **options).makespan == pytest.approx(makespan)


@pytest.mark.parametrize(("crowding", "slower"), [(1, 4 / 3), (0.5, 8 / 7)])
def test_crowding_is_the_loss_of_threads_at_random(crowding, slower):
    """Two threads on two cores share one of them half of the time: 1.5 are busy, not 2."""
    crowded = simulate(gpipe(2, 2), Costs(1, 2), cores=2, crowding=crowding)
    # 0F0 alone, then 0F1 beside 1F0, then 1F1 alone.
    assert crowded.ends[1][:2] == pytest.approx((1 + slower, 2 + slower))


@given(st.floats(1.1, 64), st.floats(0.1, 1))
def test_many_threads_keep_all_cores_busy(cores, crowding):
    schedule, loads = gpipe(2, 4), 40 * cores
    fair = simulate(schedule, cores=cores, loads=loads)
    crowded = simulate(schedule, cores=cores, loads=loads, crowding=crowding)
    assert crowded.makespan == pytest.approx(fair.makespan, rel=1e-6)


def ticks_of(rows):
    return {action: tick for row in rows for tick, action in enumerate(row) if action is not None}


@given(schedules)
def test_lockstep_has_every_action_once_after_its_inputs(schedule):
    rows = lockstep(schedule)
    assert len({len(row) for row in rows}) == 1
    assert tuple(tuple(a for a in row if a) for row in rows) == schedule.rows
    ticks = ticks_of(rows)
    for action, inputs in inputs_of(schedule).items():
        assert all(ticks[needed] < ticks[action] for needed in inputs)


@pytest.mark.parametrize(
    ("devices", "microbatches", "virtual"),
    [
        *((1, 1, 1), (1, 3, 2), (2, 1, 3), (2, 4, 1), (2, 8, 2), (4, 1, 1), (4, 3, 2), (4, 4, 3)),
        *((4, 8, 2), (5, 3, 3), (5, 4, 1), (5, 8, 2)),
    ],
)
def test_a_loop_sends_to_the_neighbour_at_each_tick(devices, microbatches, virtual):
    """So what a device gets is what its neighbour made one tick before, or waits in a slot."""
    schedule = validate(looped_bfs(devices, microbatches, virtual))
    rows = lockstep(schedule.only_forward())
    ticks = ticks_of(rows)
    for action, tick in ticks.items():
        stage, m = action.stage, action.microbatch
        if stage % devices:
            assert ticks[Action(stage - 1, "F", m)] == tick - 1
        elif stage:
            assert ticks[Action(stage - 1, "F", m)] < tick
        if (stage + 1) % devices == 0:
            # Its slot on the first device was read for this round, and not yet for the next.
            assert ticks[Action(stage + 1 - devices, "F", m)] <= tick
            assert tick < ticks.get(Action(stage + 1, "F", m), len(rows[0]))
    # Backward the ticks are the same in the reverse order.
    backward = [
        tuple(a and Action(a.stage, "B", a.microbatch) for a in reversed(row)) for row in rows
    ]
    assert lockstep(schedule) == tuple(map(tuple, map(itertools.chain, rows, backward)))
