"""Invalid schedules and their errors, and transfers that meet."""

import dataclasses
import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Action,
    Schedule,
    execution_order,
    gpipe,
    one_f_one_b,
    simulate,
    validate,
    zb_h1,
    zb_v,
)
from pipemesh.schedule.action import needs
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.validate import Receive, Send, insert_transfers
from tests.schedule.rendezvous import check_rendezvous

A = Action.from_text


def corrupt(schedule, change):
    rows = [list(row) for row in schedule.rows]
    change(rows)
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def swap(row, one, two):
    i, j = row.index(A(one)), row.index(A(two))
    row[i], row[j] = row[j], row[i]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[0].pop(1), r"device 0 never does 0F1; it belongs near tick \d"),
        (
            lambda rows: rows[1].append(A("1F0")),
            "device 1, tick 4: 1F0 was already done on this device at tick 0",
        ),
        (
            lambda rows: rows[1].append(rows[0].pop()),
            "device 1, tick 4: 0B0 runs here, but stage 0 is on device 0",
        ),
        (
            lambda rows: rows[0].reverse(),
            r"device 0, tick 0: 0B0 comes before 0F0 \(tick 3\), whose result it needs",
        ),
        (
            lambda rows: rows[0].append(A("0F7")),
            "device 0, tick 4: 0F7 lies outside 2 stages and 2 microbatches",
        ),
        (lambda rows: rows[0].append(A("7F0")), "device 0, tick 4: 7F0 lies outside"),
        (lambda rows: rows[1].pop(), r"device 1 never does 1B0 or its I and W \(1I0, 1W0\)"),
        (
            lambda rows: swap(rows[0], "0B0", "0B1") or swap(rows[0], "0F1", "0B0"),
            "deadlock: device 0, tick 1: 0B0 waits for 1B0; device 1, tick 1: 1F1 waits for 0F1",
        ),
    ],
    ids=["missing F", "twice", "two devices", "order", "beyond M", "beyond S", "missing B", "lock"],
)
def test_corrupted_gpipe_is_rejected_by_device_and_tick(change, message):
    with pytest.raises(ScheduleError, match=message):
        validate(corrupt(gpipe(2, 2), change))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: swap(rows[1], "1I0", "1W0"), "device 1, tick 1: 1W0 comes before 1I0"),
        (lambda rows: rows[0].remove(A("0W1")), "device 0 never does 0W1; .* near tick"),
        (lambda rows: rows[0].remove(A("0I1")), "device 0 never does 0I1; .* near tick"),
        (
            lambda rows: rows[1].append(A("1B0")),
            "device 1, tick 1: 1I0 is part of 1B0, which this device does too",
        ),
        (
            lambda rows: rows[0].append(A("0W2")),
            "device 0, tick 9: 0W2 was already done",
        ),
    ],
    ids=["W before I", "missing W", "missing I", "B and I", "W twice"],
)
def test_corrupted_split_backward_is_rejected_by_device_and_tick(change, message):
    schedule = zb_h1(2, 3)
    with pytest.raises(ScheduleError, match=message):
        validate(corrupt(schedule, change))


def test_the_turn_of_a_v_is_checked_within_the_row():
    schedule = corrupt(zb_v(1, 2), lambda rows: swap(rows[0], "0F0", "1F0"))
    with pytest.raises(ScheduleError, match=r"device 0, tick 0: 1F0 comes before 0F0 \(tick 1\)"):
        validate(schedule)


def test_the_error_shows_the_rows_around_the_cell():
    schedule = corrupt(one_f_one_b(4, 4), lambda rows: swap(rows[2], "2F1", "2B1"))
    with pytest.raises(ScheduleError) as info:
        validate(schedule)
    assert str(info.value) == (
        "device 2, tick 1: 2B1 comes before 2F1 (tick 4), whose result it needs\n"
        "  tick        0     1     2     3     4\n"
        "  device 1:  1F0   1F1   1F2   1B0   1F3\n"
        "  device 2:  2F0  [2B1]  2B0   2F2   2F1\n"
        "  device 3:  3F0   3B0   3F1   3B1   3F2"
    )


def test_a_schedule_has_stages_and_microbatches():
    with pytest.raises(ScheduleError, match="num_microbatches is 0"):
        validate(dataclasses.replace(gpipe(1, 1), num_microbatches=0))
    with pytest.raises(ScheduleError, match="no stages"):
        validate(Schedule((), (), 1))


@given(st.data())
def test_dropping_or_doubling_or_moving_any_action_is_noticed(data):
    name = data.draw(st.sampled_from(sorted(set(BUILDERS) - {"forward_only", "decode"})))
    schedule = build(name, 2, 4)
    rows = [list(row) for row in schedule.rows]
    device = data.draw(st.integers(0, 1))
    tick = data.draw(st.integers(0, len(rows[device]) - 1))
    damage = data.draw(st.sampled_from(["drop", "double", "move"]))
    action = rows[device][tick]
    if damage == "drop":
        del rows[device][tick]
    elif damage == "double":
        rows[device].append(action)
    else:
        del rows[device][tick]
        rows[1 - device].append(action)
    broken = dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))
    with pytest.raises(ScheduleError) as info:
        validate(broken)
    message = str(info.value)
    assert f"device {device}" in message or f"device {1 - device}" in message
    assert "tick" in message
    with pytest.raises(ScheduleError):
        simulate(broken)


@given(st.data())
def test_validation_order_and_simulation_agree(data):
    """Shuffled rows: the prover, the execution order and the simulator agree."""
    schedule = build(data.draw(st.sampled_from(["gpipe", "zb_h1", "zb_v"])), 2, 2)
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    shuffled = dataclasses.replace(schedule, rows=rows)
    try:
        validate(shuffled)
    except ScheduleError:
        with pytest.raises(ScheduleError):
            simulate(shuffled)
        with pytest.raises(ScheduleError):
            execution_order(shuffled)
        return
    split = {(a.stage, a.microbatch) for row in rows for a in row if a.kind == "I"}
    done = set()
    for action in execution_order(shuffled):
        assert set(needs(action, schedule.num_stages, split)) <= done
        done.add(action)
    assert len(done) == sum(map(len, rows))
    assert simulate(shuffled).makespan > 0


def test_b_and_split_backwards_may_be_mixed():
    text = "0: 0F0 0F1 0B0 0I1 0W1\n1: 1F0 1I0 1F1 1B1 1W0"
    order = [str(a) for a in execution_order(Schedule.from_text(text))]
    assert order.index("1I0") < order.index("0B0")
    assert order.index("1B1") < order.index("0I1")


def test_forward_only_tables_are_complete_without_backwards():
    validate(Schedule.from_text("0F0 0F1\n1F0 1F1"))
    with pytest.raises(ScheduleError, match="device 1 never does 1B0"):
        validate(Schedule.from_text("0F0 0B0\n1F0"))


def naive(schedule):
    """Send right after the producer, receive right before the consumer."""
    homes, last = schedule.stage_devices, schedule.num_stages - 1
    rows = []
    for device, row in enumerate(schedule.rows):
        steps = []
        for action in row:
            step = {"F": 1, "B": -1}[action.kind]
            source, target = action.stage - step, action.stage + step
            if 0 <= source <= last and homes[source] != device:
                steps.append(Receive(Action(source, action.kind, action.microbatch), homes[source]))
            steps.append(action)
            if 0 <= target <= last and homes[target] != device:
                steps.append(Send(action, homes[target]))
        rows.append(tuple(steps))
    return rows


def test_the_obvious_transfers_deadlock_on_1f1b():
    schedule = one_f_one_b(2, 4)
    with pytest.raises(ScheduleError, match="deadlock: device 0 waits at step 3 in send"):
        check_rendezvous(naive(schedule))
    check_rendezvous(insert_transfers(schedule))


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 5), st.integers(1, 3))
def test_every_transfer_is_sent_and_received_once(name, num_devices, factor):
    schedule = build(name, num_devices, 2 * factor * num_devices)
    rows = insert_transfers(schedule)
    check_rendezvous(rows)
    sends = [(s.action, d, s.device) for d, row in enumerate(rows) for s in row if type(s) is Send]
    receives = [
        (s.action, s.device, d) for d, row in enumerate(rows) for s in row if type(s) is Receive
    ]
    assert sorted(sends) == sorted(receives)
    assert len(set(sends)) == len(sends)
    homes = schedule.stage_devices
    crossings = sum(a != b for a, b in itertools.pairwise(homes))
    ways = 1 if schedule.is_forward_only else 2
    assert len(sends) == ways * crossings * schedule.num_microbatches


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4))
def test_values_are_received_before_they_are_consumed(name, num_devices):
    schedule = build(name, num_devices, 2 * num_devices)
    homes, last = schedule.stage_devices, schedule.num_stages - 1
    for device, row in enumerate(insert_transfers(schedule)):
        have = set()
        for step in row:
            if isinstance(step, Receive):
                have.add((step.action.stage, step.action.kind == "F", step.action.microbatch))
            elif isinstance(step, Action) and step.kind != "W":
                source = step.stage + (-1 if step.kind == "F" else 1)
                if 0 <= source <= last and homes[source] != device:
                    assert (source, step.kind == "F", step.microbatch) in have


def test_steps_read_well():
    steps = insert_transfers(one_f_one_b(2, 1))
    assert [str(step) for step in steps[0]] == [
        "0F0",
        "send(0F0 to 1)",
        "receive(1B0 from 1)",
        "0B0",
    ]
