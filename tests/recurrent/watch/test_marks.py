"""Marks say of a step that is under way how far each device has come."""

import threading
import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent import Marks, Options, Stage, pipeline_loss
from pipemesh.schedule import gpipe, interleaved_one_f_one_b, one_f_one_b, zb_h1

SECONDS = 20


class Door:
    """Lets all pass but one call, until it is opened."""

    def __init__(self):
        self.shut, self.reached, self.opened = None, threading.Event(), threading.Event()

    def wait(self, stage, kind):
        def pass_by(value, microbatch, *_):
            if self.shut == (stage, kind, int(microbatch)):
                self.reached.set()
                assert self.opened.wait(SECONDS)
            return value

        return pass_by


def stages(schedule, door):
    last = schedule.num_stages - 1

    def make(number):
        def forward(theta, carry, inputs, microbatch, step):
            @tf.custom_gradient
            def cell(x):
                def passed(value, kind, *more):
                    run = door.wait(number, kind)
                    result = tf.numpy_function(
                        run, [value, microbatch, *more], value.dtype, stateful=False
                    )
                    return tf.ensure_shape(result, value.shape)

                y = passed(x, "F")
                return y, lambda grad: passed(grad, "B", y)

            x = cell(inputs[0] * theta[0])
            return [tf.reduce_sum(x * x) if number == last else x], []

        device = f"CPU:{schedule.stage_devices[number]}"
        return Stage(f"s{number}", forward, [tf.constant(1.0)], [], device)

    return [make(s) for s in range(schedule.num_stages)]


def marked(schedule, **options):
    """A step with marks, and the door in its stages."""
    door = Door()
    homes = [[f"CPU:{device}"] for device in schedule.stage_devices]
    marks = Marks(schedule, homes)

    @tf.function
    def step(x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            cells = stages(schedule, door)
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
@pytest.mark.parametrize(
    ("loop", "remat"),
    [(False, "none"), (True, "full"), (False, "full"), (True, "none")],
)
def test_a_step_that_hangs_says_who_waits_for_which_action_of_whom(loop, remat):
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
