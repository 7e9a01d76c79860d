"""A process that is kept on one core, with the threads that it has and gets."""

import os
import sys
import threading
import time

import pytest

from pipemesh.training.measuring.one_core import one_core

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
    old = threading.Thread(target=stop.wait)
    old.start()
    new = threading.Thread(target=stop.wait)
    try:
        with one_core() as is_one:
            assert is_one
            new.start()
            assert all(cores == {min(before)} for cores in cores_of_all())
        assert all(cores == before for cores in cores_of_all())
    finally:
        stop.set()
        old.join()
        new.join()


def test_cores_come_back_after_an_error():
    before = os.sched_getaffinity(0)
    with pytest.raises(KeyError), one_core():
        raise KeyError
    assert os.sched_getaffinity(0) == before


def test_two_threads_take_as_long_as_both_compute():
    """Which is what it is for: on one core the clock says what all cores would have done."""

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
