"""Marks say of a step that is under way how far each device has come."""

import contextlib
import itertools
import threading
import time

import pytest
import tensorflow as tf

from pipemesh.recurrent import Marks
from pipemesh.recurrent.watch.marks import Stand, waits_of
from pipemesh.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b, zb_h1
from tests.recurrent.calls import calling_step


def stands(schedule, *ended, begun=(), silent=()):
    """How many actions each device has done; who has begun the next one; and who is silent."""
    return [
        Stand(name, schedule.rows[row], count + (name in begun), count, name in silent)
        for row, (name, count) in enumerate(zip("abcd", ended, strict=False))
    ]


# Rows of 1F1B: 0F0 0F1 0B0 0F2 0B1 ...; 1F0 1B0 1F1 1B1 ...
WAITS = {
    "for a gradient": (
        one_f_one_b(2, 4),
        [2, 0],
        {"begun": "b"},
        ["a: waits to begin 0B0, for 1B0 of b", "b: in 1F0"],
    ),
    "a chain ends at the one at work": (
        gpipe(4, 2),
        [2, 2, 1, 0],
        {"begun": "d"},
        [
            "a: waits to begin 0B1, for 1B1 of b",
            "b: waits to begin 1B1, for 2B1 of c",
            "c: waits to begin 2F1, for what it needs to arrive",
            "d: in 3F0",
        ],
    ),
    "recomputation has begun": (
        one_f_one_b(2, 4),
        [2, 1],
        {"begun": "ab"},
        ["a: in 0B0, waits for 1B0 of b", "b: in 1B0"],
    ),
    "for the first half": (
        zb_h1(2, 2),
        [2, 1],
        {},
        [
            "a: waits to begin 0I0, for 1I0 of b",
            "b: waits to begin 1I0, for what it needs to arrive",
        ],
    ),
    # The first stage has done 0B1, so the second one has done 1B1 and what stands before it.
    "a silent device is as far as its results were used": (
        one_f_one_b(2, 4),
        [5, 0],
        {"begun": "a", "silent": "b"},
        ["a: in 0F3", "b: does not answer, in 1F2 or later"],
    ),
    "nobody": (one_f_one_b(2, 2), [4, 4], {}, []),
}


@pytest.mark.parametrize(("schedule", "ended", "others", "wanted"), WAITS.values(), ids=WAITS)
def test_each_device_says_what_it_waits_for(schedule, ended, others, wanted):
    waits = waits_of(schedule, stands(schedule, *ended, **others))
    assert [str(wait) for wait in waits] == wanted


def test_of_a_home_with_two_devices_the_slower_is_named():
    schedule = one_f_one_b(2, 2)
    both = [
        Stand("a0", schedule.rows[0], 1, 1),
        Stand("a1", schedule.rows[0], 1, 0),
        Stand("b", schedule.rows[1], 0, 0),
    ]
    assert [wait.told(str.upper) for wait in waits_of(schedule, both)] == [
        "A0: waits to begin 0F1, for what it needs to arrive",
        "A1: in 0F0",
        "B: waits to begin 1F0, for 0F0 of A1",
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
    return marks, door, calling_step(schedule, door.wait, clock=marks, **options)


@contextlib.contextmanager
def hanging(door, step, at, seconds=0.3):
    """Runs a step that hangs in an action, in a thread of its own; others do what they can."""
    door.shut = at
    door.reached.clear()
    door.opened.clear()
    thread = threading.Thread(target=step)
    thread.start()
    try:
        assert door.reached.wait(SECONDS)
        time.sleep(seconds)
        yield
    finally:
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
    with hanging(door, step, (1, "F", 3)):
        waits = [str(wait) for wait in marks.waits(SECONDS)]
        again = "in 0B3, waits" if remat == "full" else "waits to begin 0B3,"
        assert waits == [f"CPU:0: {again} for 1B3 of CPU:1", "CPU:1: in 1F3"]
    assert marks.waits(SECONDS) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("make", [zb_h1, interleaved_one_f_one_b])
def test_every_schedule_has_marks(make):
    schedule = make(2, 4)
    marks, door, step = marked(schedule)
    step()
    assert [stand.ended for stand in marks.stands(SECONDS)] == [len(row) for row in schedule.rows]
    marks.end_step()
    with hanging(door, step, (0, "B", 1)):
        found = {str(wait.action) for wait in marks.waits(SECONDS) if not wait.missing}
        assert found & {"0B1", "0I1"}


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_after_a_step_that_failed_counting_begins_anew():
    marks, _, step = marked(one_f_one_b(2, 4))
    step()
    marks.end_step()
    step()
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
    with hanging(door, step, (1, "F", 1), seconds=1.3):
        pass
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
