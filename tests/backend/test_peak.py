"""Measured peaks of compute and memory."""

import gc
import resource

import pytest
import tensorflow as tf

from pipemesh.backend.peak import TensorMemory, peak_flops, peak_memory


def test_a_device_counts_once():
    seen = []

    def matmul(a, b, real=tf.linalg.matmul):
        seen.append(a.device)
        return real(a, b)

    original, tf.linalg.matmul = tf.linalg.matmul, matmul
    try:
        found = peak_flops(["CPU:0", "CPU:1", "CPU:0"])
    finally:
        tf.linalg.matmul = original
    assert len(seen) == 2
    # No machine that runs this does a petaflop.
    assert 1e8 < found < 1e15


def test_memory_is_that_of_the_process():
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert peak_memory(["CPU:0", "CPU:1"]) >= 1024 * most > 1e7


def test_tensors_are_counted_as_they_come_and_go():
    memory = TensorMemory("CPU:0")
    if not memory.is_counted:
        pytest.skip("this build of TensorFlow does not count the CPU's memory")
    size = 2**22
    gc.collect()
    memory.forget_peak()
    begin = memory.current
    held = tf.fill([size], tf.ones([], tf.uint8))
    assert memory.current - begin >= size
    del held
    assert memory.current - begin < size <= memory.peak - begin
    memory.forget_peak()
    assert memory.peak - begin < size


def test_an_uncounted_device_has_zero_memory():
    memory = TensorMemory("CPU:99")
    memory.forget_peak()
    assert (memory.is_counted, memory.current, memory.peak) == (False, 0, 0)
