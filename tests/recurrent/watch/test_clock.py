"""A clock tells when each action really ran."""

import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import ScheduleError
from pipemesh.recurrent import ActionClock, Options, pipeline
from pipemesh.schedule import forward_only, gpipe, one_f_one_b, simulate, zb_h1
from tests.recurrent.calls import calling_stages, calling_step

pytestmark = pytest.mark.serial
WAIT = 0.03


def wait(stage, kind, microbatch):
    """A forward pass takes WAIT seconds, a backward pass twice that."""
    time.sleep(WAIT * " FB".index(kind))


def timed(schedule, **options):
    clock = ActionClock()
    step = calling_step(schedule, wait, clock=clock, remat="none", **options)
    step()
    step()
    return clock.timeline(schedule)


def test_actions_are_timed_in_the_order_of_their_rows():
    schedule = one_f_one_b(2, 5)
    measured = timed(schedule, loop=False)
    for starts, ends in zip(measured.starts, measured.ends, strict=True):
        assert list(starts) == sorted(starts)
        assert all(b >= a for a, b in zip(ends, starts[1:], strict=False))
    costs = measured.costs.per_stage(2)
    assert min(costs.forward) >= WAIT
    assert min(costs.backward) >= 2 * WAIT
    assert measured.makespan >= simulate(schedule, measured.costs).makespan * 0.9
    assert min(min(starts) for starts in measured.starts) == 0


def test_halves_are_timed_and_a_stage_without_weights_has_a_W_of_no_time():
    schedule = zb_h1(2, 4)
    measured = timed(schedule, weights=[1.0, None], loop=True)
    found = {
        action: end - start
        for row, starts, ends in zip(schedule.rows, measured.starts, measured.ends, strict=True)
        for action, start, end in zip(row, starts, ends, strict=True)
    }
    assert {found[action] for action in found if action.kind == "W" and action.stage == 1} == {0.0}
    assert min(found[action] for action in found if action.kind == "I") >= 2 * WAIT
    assert 2 * WAIT > max(measured.costs.per_stage(2).weight_grad) > 0


def test_a_backward_pass_with_the_loss_outside_is_timed():
    clock, schedule = ActionClock(), gpipe(2, 2)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            (y,), _ = pipeline(
                calling_stages(schedule, wait, has_loss=False),
                [x],
                schedule,
                options=Options(clock=clock),
            )
            loss = tf.reduce_sum(y * y)
        return tape.gradient(loss, x)

    with pytest.raises(ScheduleError, match="no action was timed"):
        clock.span()
    with pytest.raises(ScheduleError, match="action 0F0 was not timed; run a step"):
        clock.timeline(schedule)
    begin = time.perf_counter()
    step(tf.constant([1.0, 2.0]))
    assert len(list(clock.timeline(schedule).spans())) == 8
    first, last = clock.span()
    assert begin < first < last < time.perf_counter()
    assert last - first == pytest.approx(clock.timeline(schedule).makespan)


def test_devices_of_a_home_that_drift_apart_still_wait(monkeypatch):
    """From the first start to the last end, the home of two devices was never idle."""
    clock, schedule = ActionClock(), forward_only(1, 2)
    for replica, late in ((0, 0.0), (1, 1.0)):
        for microbatch, begin in ((0, 0.0), (1, 2.0)):
            for is_end in (False, True):
                now = begin + late + is_end
                monkeypatch.setattr(time, "perf_counter", lambda now=now: now)
                clock._note(np.array([0, 0, is_end, replica]), np.int64(microbatch))
    found = clock.timeline(schedule)
    assert found.starts == ((0.0, 2.0),) and found.ends == ((1.0, 3.0),)
    assert found.bubble_ratio == pytest.approx(1 / 3)


def test_who_asks_is_told_of_each_action_when_it_starts_and_ends():
    told, schedule = [], zb_h1(1, 2)
    clock = ActionClock(lambda action, is_end: told.append((str(action), is_end)))
    calling_step(schedule, wait, clock=clock, remat="none")()
    actions = [str(action) for action in schedule.rows[0]]
    assert told == [(action, is_end) for action in actions for is_end in (False, True)]
