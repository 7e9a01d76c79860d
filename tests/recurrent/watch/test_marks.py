"""Marks say of a step that is under way how far each device has come."""

import itertools
import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Marks, Options, pipeline_loss
from pipemesh.recurrent.watch.marks import Stand, waits_of
from pipemesh.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b, zb_h1
from tests.recurrent.calls import calling_stages


def stands(schedule, *ended, begun=(), silent=()):
    """How many actions each device has done; who has begun the next one; and who is silent."""
    return [
        Stand(name, row, schedule.rows[row], count + (name in begun), count, name in silent)
        for row, (name, count) in enumerate(zip("abcd", ended, strict=False))
    ]


def told(*arguments, **keywords):
    return [str(wait) for wait in waits_of(arguments[0], stands(*arguments, **keywords))]


def test_each_device_says_what_it_waits_for():
    # Rows: 0F0 0F1 0B0 ...; 1F0 1B0 1F1 ...
    assert told(one_f_one_b(2, 4), 2, 0, begun="b") == [
        "a: waits to begin 0B0, for 1B0 of b",
        "b: in 1F0",
    ]


def test_a_chain_of_waits_ends_at_the_one_who_is_at_work():
    found = told(gpipe(4, 2), 2, 2, 1, 0, begun="d")
    assert found == [
        "a: waits to begin 0B1, for 1B1 of b",
        "b: waits to begin 1B1, for 2B1 of c",
        "c: waits to begin 2F1, for what it needs to arrive",
        "d: in 3F0",
    ]


def test_who_recomputes_has_begun_and_waits_for_the_gradient():
    found = told(one_f_one_b(2, 4), 2, 1, begun="ab")
    assert found == ["a: in 0B0, waits for 1B0 of b", "b: in 1B0"]


def test_a_split_backward_pass_waits_for_the_first_half():
    schedule = zb_h1(2, 2)
    at = next(i for i, action in enumerate(schedule.rows[0]) if action.kind == "I")
    assert told(schedule, at, 1)[0] == "a: waits to begin 0I0, for 1I0 of b"


def test_a_silent_device_is_as_far_as_its_results_were_used():
    schedule = one_f_one_b(2, 4)
    # The first stage has done 0B1, so the second one has done 1B1 and what stands before it.
    done = schedule.rows[0].index(next(a for a in schedule.rows[0] if str(a) == "0B1")) + 1
    found = told(schedule, done, 0, begun="a", silent="b")
    assert found == ["a: in 0F3", "b: does not answer, in 1F2 or later"]
    found = [wait.told(str.upper) for wait in waits_of(schedule, stands(schedule, 4, 0))]
    assert found[0] == "A: waits to begin 0B1, for 1B1 of B"


def test_who_is_done_waits_for_nobody():
    schedule = one_f_one_b(2, 2)
    assert told(schedule, 4, 4) == []


def test_of_a_home_with_two_devices_the_slower_is_named():
    schedule = one_f_one_b(2, 2)
    both = [
        Stand("a0", 0, schedule.rows[0], 1, 1),
        Stand("a1", 0, schedule.rows[0], 1, 0),
        Stand("b", 1, schedule.rows[1], 0, 0),
    ]
    assert [str(wait) for wait in waits_of(schedule, both)] == [
        "a0: waits to begin 0F1, for what it needs to arrive",
        "a1: in 0F0",
        "b: waits to begin 1F0, for 0F0 of a1",
    ]


@pytest.mark.parametrize("make", [gpipe, one_f_one_b, zb_h1])
def test_wherever_a_step_hangs_somebody_is_to_blame(make):
    """Not everybody waits for another: else no step would end."""
    schedule = make(3, 3)
    lengths = [len(row) for row in schedule.rows]
    for ended in itertools.product(*(range(0, n + 1, 2) for n in lengths)):
        waits = waits_of(schedule, stands(schedule, *ended))
        assert not waits or any(not wait.missing for wait in waits)


SECONDS = 20


class Door:
    """Lets all pass but one call, until it is opened."""

    def __init__(self):
        self.shut, self.reached, self.opened = None, threading.Event(), threading.Event()

    def wait(self, *action):
        if self.shut == action:
            self.reached.set()
            assert self.opened.wait(SECONDS)


def marked(schedule, **options):
    """A step with marks, and the door in its stages."""
    door = Door()
    homes = [[f"CPU:{device}"] for device in schedule.stage_devices]
    marks = Marks(schedule, homes)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            cells = calling_stages(schedule, door.wait)
            loss, _, _ = pipeline_loss(
                cells, [x], schedule, options=Options(clock=marks, **options)
            )
        return tape.gradient(loss, x)

    x = tf.constant(np.arange(schedule.num_microbatches, dtype=np.float32))
    return marks, door, lambda: step(x)


def hung(door, step, at):
    """A step that hangs in an action, in a thread of its own."""
    door.shut = at
    door.reached.clear()
    door.opened.clear()
    thread = threading.Thread(target=step)
    thread.start()
    assert door.reached.wait(SECONDS)
    # What others may still do.
    time.sleep(0.3)
    return thread


def freed(door, thread):
    door.shut = None
    door.opened.set()
    thread.join(SECONDS)
    assert not thread.is_alive()


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("loop", "remat"), [(True, "full"), (False, "none")])
def test_a_hanging_step_names_devices_and_actions(loop, remat):
    marks, door, step = marked(one_f_one_b(2, 6), loop=loop, remat=remat)
    for _ in range(2):
        step()
        assert marks.waits(SECONDS) == []
        marks.end_step()
    thread = hung(door, step, (1, "F", 3))
    try:
        waits = [str(wait) for wait in marks.waits(SECONDS)]
        again = "in 0B3, waits" if remat == "full" else "waits to begin 0B3,"
        assert waits == [f"CPU:0: {again} for 1B3 of CPU:1", "CPU:1: in 1F3"]
    finally:
        freed(door, thread)
    assert marks.waits(SECONDS) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [gpipe, zb_h1, lambda s, m: interleaved_one_f_one_b(s, m, 2)])
def test_every_schedule_has_marks(make):
    schedule = make(2, 4)
    marks, door, step = marked(schedule)
    step()
    assert [stand.ended for stand in marks.stands(SECONDS)] == [len(row) for row in schedule.rows]
    marks.end_step()
    thread = hung(door, step, (0, "B", 1))
    try:
        found = {str(wait.action) for wait in marks.waits(SECONDS) if not wait.missing}
        assert found & {"0B1", "0I1"}
    finally:
        freed(door, thread)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_after_a_step_that_failed_counting_begins_anew():
    marks, door, step = marked(one_f_one_b(2, 4))
    step()
    marks.end_step()

    thread = hung(door, step, (1, "B", 2))
    freed(door, thread)
    # As if it had failed: it was not counted.
    marks.end_failed_step(SECONDS)
    assert [(stand.started, stand.ended) for stand in marks.stands(SECONDS)] == [(0, 0)] * 2
    step()
    assert marks.waits(SECONDS) == []


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(120)
def test_time_at_work_is_that_of_actions_and_not_of_waiting():
    marks, door, step = marked(one_f_one_b(2, 4), remat="none")
    step()
    marks.end_step()
    before = marks.seconds_at_work(SECONDS)
    thread = hung(door, step, (1, "F", 1))
    time.sleep(1.0)
    freed(door, thread)
    after = marks.seconds_at_work(SECONDS)
    taken = {device: after[device] - before[device] for device in after}
    assert taken["CPU:1"] > 1.2
    assert 0 < taken["CPU:0"] < 0.5


def test_nobody_asks_for_a_mark_that_has_no_value_yet(monkeypatch):
    """What failed on a worker made the next call fail: a step was looked at while it was traced."""
    found, assign = [], tf.raw_ops.AssignVariableOp
    marks, _, step = marked(gpipe(2, 2))

    def slow(**keywords):
        # As another thread may see it now.
        found.append((len(marks.stands(SECONDS)), dict(marks._seen)))
        return assign(**keywords)

    monkeypatch.setattr(tf.raw_ops, "AssignVariableOp", slow)
    step()
    assert [number for number, _ in found] == [0, 1]
    assert all(len(seen) == number for number, seen in found)
    assert len(marks.stands(SECONDS)) == 2
