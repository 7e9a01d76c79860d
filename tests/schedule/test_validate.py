"""Invalid schedules are noticed everywhere, and transfers meet."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, build, execution_order, simulate, validate
from pipemesh.schedule.builders import BUILDERS
from pipemesh.schedule.validate import Receive, Send, insert_transfers
from tests.schedule.random_schedules import inputs_of, schedules
from tests.schedule.rendezvous import check_rendezvous


@given(st.data())
def test_dropping_or_doubling_or_moving_any_action_is_noticed(data):
    name = data.draw(st.sampled_from(sorted(set(BUILDERS) - {"forward_only", "decode"})))
    schedule = build(name, 2, 4)
    rows = [list(row) for row in schedule.rows]
    device = data.draw(st.integers(0, 1))
    tick = data.draw(st.integers(0, len(rows[device]) - 1))
    damage = data.draw(st.sampled_from(["drop", "double", "move"]))
    action = rows[device][tick]
    if damage != "double":
        del rows[device][tick]
    if damage != "drop":
        rows[device if damage == "double" else 1 - device].append(action)
    broken = dataclasses.replace(schedule, rows=rows)
    with pytest.raises(ScheduleError, match=r"device [01]\b.*\btick"):
        validate(broken)
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
        for use in (simulate, execution_order):
            with pytest.raises(ScheduleError):
                use(shuffled)
        return
    check_order(shuffled)
    assert simulate(shuffled).makespan > 0


def check_order(schedule):
    inputs, done = inputs_of(schedule), set()
    for action in execution_order(schedule):
        assert inputs[action] <= done
        done.add(action)
    assert len(done) == sum(map(len, schedule.rows))


@given(schedules)
def test_actions_follow_their_inputs_and_transfers_meet(schedule):
    """Each value that crosses is sent once, received once, and there before it is needed."""
    check_order(schedule)
    rows, homes, crossing = insert_transfers(schedule), schedule.stage_devices, set()
    check_rendezvous(rows)
    for action, inputs in inputs_of(schedule).items():
        there = rows[homes[action.stage]]
        for needed in inputs:
            here = homes[needed.stage]
            if rows[here] is not there:
                crossing.add(needed)
                assert Send(needed, homes[action.stage]) in rows[here]
                assert there.index(Receive(needed, here)) < there.index(action)
    for kind in (Send, Receive):
        transfers = [step.action for row in rows for step in row if isinstance(step, kind)]
        assert sorted(map(str, transfers)) == sorted(map(str, crossing))


def test_the_obvious_transfers_deadlock_on_1f1b():
    """Send right after the producer, receive right before the consumer."""
    f0, f1, b0 = map(Action.from_text, ("0F0", "0F1", "1B0"))
    ahead = [f0, Send(f0, 1), f1, Send(f1, 1), Receive(b0, 1)]
    behind = [Receive(f0, 0), f0.also("F", 1), b0, Send(b0, 0), Receive(f1, 0)]
    assert list(map(str, ahead[3:])) == ["send(0F1 to 1)", "receive(1B0 from 1)"]
    with pytest.raises(ScheduleError, match="deadlock: device 0 waits at step 3 in send"):
        check_rendezvous([ahead, behind])
