"""Reports on workers: their current actions, and the slow ones."""

import pytest

from pipemesh.hosts.watch import Watch
from pipemesh.recurrent.watch.marks import Stand, waits_of
from pipemesh.schedule import one_f_one_b
from pipemesh.training.trainer import Workers, stage_rows
from tests.layers.harness import cluster
from tests.layers.pipeline.named_stacks import language, language_layers

DEVICES = [f"/job:worker/replica:0/task:{task}/device:CPU:0" for task in range(3)]


class Marks:
    """Stands for the marks of three workers with a stage each."""

    def __init__(self, seconds=(0.0, 0.0, 0.0)):
        self.seconds, self.steps, self.failed = list(seconds), 0, 0
        self.schedule = one_f_one_b(3, 2)

    def seconds_at_work(self, seconds):
        return dict(zip(DEVICES, self.seconds, strict=True))

    def shares(self, costs):
        return dict(zip(DEVICES, costs["F"], strict=True))

    def waits(self, seconds):
        ended = [2, 1, 0]
        return waits_of(
            self.schedule,
            [
                Stand(device, self.schedule.rows[row], count + (row == 2), count)
                for row, (device, count) in enumerate(zip(DEVICES, ended, strict=True))
            ],
        )

    def end_step(self):
        self.steps += 1


@pytest.fixture
def workers(monkeypatch):
    def task_of(device):
        return int(device.split("task:")[1][0])

    monkeypatch.setattr("pipemesh.training.trainer.task_of", task_of)
    places = {0: "a:1", 2: "b:1", 3: "c:1"}
    watched = Watch(places, [1, 1, 1], 1.0, pytest.fail)
    watched.stages = {0: "stage 0", 1: "stage 1", 2: "stage 2"}
    found = Workers([], watched)
    found._marks = [Marks()]
    return found


def after(workers, *seconds, steps=10):
    """The work of so many steps after the first, in which workers were so long at work."""
    marks = workers._marks[0]
    workers.end_step()
    for _ in range(steps):
        workers.end_step()
    marks.seconds = [have + more for have, more in zip(marks.seconds, seconds, strict=True)]
    return workers.work({"F": [1.0, 2.0, 1.0]})


def test_work_is_that_of_a_step_and_held_against_the_flops(workers):
    # That of the first step does not count.
    workers._marks[0].seconds = [0.0, 0.0, 30.0]
    first, second, third = after(workers, 1.0, 2.0, 1.2)
    assert first.worker == "worker 0 (a:1, stage 0)"
    # Workers have the numbers that they were named with, also if others are missing.
    assert third.worker == "worker 3 (c:1, stage 2)"
    assert (first.seconds, second.seconds) == pytest.approx((0.1, 0.2))
    assert second.times == pytest.approx(1.0 / 1.1)
    assert not (first.is_slow or second.is_slow or third.is_slow)
    assert workers.work(None) == []


def test_twice_the_time_for_its_flops_is_slow(workers):
    assert [each.is_slow for each in after(workers, 1.0, 2.0, 2.5)] == [False, False, True]


def test_without_flops_no_worker_is_slow(workers):
    after(workers, 1.0, 1.0, 1.0)
    workers.end_step()
    workers._marks[0].seconds[2] += 9.0
    assert [each.times for each in workers.work(None)] == [None] * 3


def test_waiting_workers_are_named(workers):
    assert workers.waits() == {
        0: [
            "worker 0 (a:1, stage 0) CPU:0: waits to begin 0B0, for 1B0 of "
            "worker 2 (b:1, stage 1) CPU:0"
        ],
        1: ["worker 2 (b:1, stage 1) CPU:0: waits to begin 1F1, for what it needs to arrive"],
        2: ["worker 3 (c:1, stage 2) CPU:0: in 2F0"],
    }


def test_the_table_of_stages_has_what_every_device_computes_where_there_is_such():
    rows = {}
    for name, first in (("embedding", 0), ("none", 1)):
        layers = language_layers()[first:]
        bounds = [0, 3 - first, len(layers)]
        with cluster("layers:2"):
            rows[name] = stage_rows(language(bounds, layers=layers).Set(name=name).Instantiate())
    stages = {name: [row[:2] for row in of_stack[1:]] for name, of_stack in rows.items()}
    alike = [("0", "2 Masked"), ("1", "2 Masked"), ("all", "Head")]
    assert stages == {"embedding": [("all", "Embed"), *alike], "none": alike}
