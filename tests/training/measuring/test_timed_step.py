"""Times of actions, temporary memory, and a process on one core."""

import itertools
import os
import sys
import threading
import time
import types

import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory
from pipemesh.schedule import Action, Schedule
from pipemesh.training.measuring.timed_step import (
    ROUNDS,
    ActionTimes,
    in_turn,
    one_core,
    usual,
    working_memory,
)

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux moves threads")


def cores_of_all():
    found = []
    for thread in os.listdir("/proc/self/task"):
        try:
            found.append(os.sched_getaffinity(int(thread)))
        except ProcessLookupError:
            continue
    return found


def test_all_threads_share_a_core_and_get_all_back():
    before, stop = os.sched_getaffinity(0), threading.Event()
    old, new = (threading.Thread(target=stop.wait) for _ in range(2))
    old.start()
    try:
        with pytest.raises(KeyError), one_core() as is_one:
            assert is_one
            new.start()
            assert all(cores == {min(before)} for cores in cores_of_all())
            raise KeyError
        assert all(cores == before for cores in cores_of_all())
        with one_core():
            assert all(cores == {min(before)} for cores in cores_of_all())
        assert all(cores == before for cores in cores_of_all())
    finally:
        stop.set()
        old.join()
        new.join()


def test_two_threads_take_as_long_as_both_compute():
    """On one core the clock shows the work that all cores would share."""

    def compute():
        end = time.thread_time() + 0.2
        while time.thread_time() < end:
            sum(range(1000))

    with one_core():
        threads = [threading.Thread(target=compute) for _ in range(2)]
        begin, cpu = time.perf_counter(), time.process_time()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        took, done = time.perf_counter() - begin, time.process_time() - cpu
    assert took >= done * 0.98 >= 0.39


class Timed:
    """A step whose actions take a second for each row of each layer, and `more` each."""

    def __init__(self, seconds, rows, more=0.0, kinds="FB", without=()):
        self.before, self.after, self.runs = 0.25, 0.5, 0
        self._own = [
            (layer, kind, each)
            for (layer, each), kind in itertools.product(enumerate(seconds), kinds)
            if (layer, kind) not in without
        ]
        self._rows, self._more = rows, more

    def run(self):
        self.runs += 1
        return 0.0

    def durations(self):
        # The first microbatch adds up no gradients, and some steps take longer.
        late = 10.0 if self.runs % 3 == 0 else 0.0
        return {
            Action(layer, kind, m): self._rows * seconds * (m or 0.1) + self._more + late
            for (layer, kind, seconds), m in itertools.product(self._own, (0, 1))
        }


def test_layer_times_exclude_the_overhead_of_actions():
    steps = [Timed([1, 2, 3], 1, 0.25), Timed([1, 2, 3], 4, 0.25)]
    times = ActionTimes(steps, [1, 4], 3, Timed([6], 1, 0.25))
    assert {step.runs for step in steps} == {ROUNDS}
    assert (times.before, times.after) == (0.25, 0.5)
    # Three actions have the overhead three times, and one has it once.
    assert times.besides(1) == pytest.approx(0.25)
    layers = times.of_layers(0.25)
    assert layers[0]["F"] == pytest.approx({1: 1, 4: 4})
    assert layers[2]["B"] == pytest.approx({1: 3, 4: 12})


def test_with_recomputation_only_r_counts():
    """The other actions of such a step have less to do, and others say what they take."""
    steps = [Timed([1, 2], 4), Timed([1, 2], 8, kinds="FRB")]
    layers = ActionTimes(steps, [4, 4], 2, Timed([6], 4)).of_layers(0.0)
    assert layers[1]["F"] == pytest.approx({4: 8}) and layers[1]["B"] == pytest.approx({4: 8})
    assert layers[1]["R"] == pytest.approx({4: 16})


def test_a_layer_has_a_share_of_its_actions_time():
    times = ActionTimes([Timed([1], 1)], [1], 1, Timed([6], 1))
    assert times.besides(1) == 0.0
    assert times.of_layers(5.0)[0]["F"] == pytest.approx({1: 0.1})


def test_a_missing_backward_pass_takes_no_time():
    bare = Timed([1, 2], 4, without=[(0, "B")])
    layers = ActionTimes([bare], [4], 2, Timed([6], 4)).of_layers(0.0)
    assert layers[0] == {"F": {4: 4.0}, "B": {4: 0.0}, "R": {4: 0.0}}
    assert layers[1]["B"] == pytest.approx({4: 8})


def test_times_in_turn_ignore_slow_phases():
    """Half of the rounds on a machine half as fast, and one time that was disturbed."""
    rounds = [[1.0, 3.0, 4.0]] * 3 + [[2.0, 6.0, 8.0]] * 2
    assert in_turn(rounds) == pytest.approx([1.0, 3.0, 4.0])
    found = in_turn([*rounds, [1.0, 3.0, 90.0]])
    assert [each / found[0] for each in found] == pytest.approx([1, 3, 4])
    # The usual time is not the shortest.
    assert usual([5.0]) == 5.0
    assert usual([1.0, 1.2, 90.0, 80.0]) == pytest.approx(1.1)


MB = 2**20


def tensor(megabytes):
    return tf.fill([megabytes * MB], tf.ones([], tf.uint8))


class Counted:
    """Two stages that keep 2 MB and 4 MB; backward passes need 3 and 5 MB, the first one more."""

    def __init__(self, device="CPU:0"):
        self.trained = types.SimpleNamespace(all_devices=lambda: [device])
        self.plan = types.SimpleNamespace(num_stages=2)
        self.noted = None
        self.runs = 0

    def run(self):
        self.runs += 1
        kept = {}
        table = Schedule.from_text("0: 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1")
        for action in table.rows[0]:
            self.noted(action, False)
            if action.kind == "F":
                kept[action.stage] = tensor(2 + 2 * action.stage)
            else:
                needed = tensor(3 + 2 * action.stage + 20 * (not action.microbatch))
                del needed, kept[action.stage]
            self.noted(action, True)
        update = tensor(9)
        del update


def test_memory_of_actions_and_update_is_measured():
    if not TensorMemory("CPU:0").is_counted:
        pytest.skip("this build of TensorFlow does not count the CPU's memory")
    step = Counted()
    found = working_memory(step)
    assert step.runs > 1 and step.noted is None
    # The allocator gives whole pieces, which may be larger than what is asked for.
    assert all(
        need * MB <= size < 2 * need * MB for need, size in zip((3, 5), found.stages, strict=True)
    )
    assert 9 * MB <= found.update < 18 * MB
    # Of a device that is not counted it is unknown.
    step = Counted("CPU:99")
    assert working_memory(step) is None and not step.runs
