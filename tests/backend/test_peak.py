"""Measured peaks of compute and memory."""

import contextlib
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


def test_a_gpu_multiplies_long_enough(monkeypatch):
    """One product of size 1024 measured how long a GPU takes to begin.

    Its memory counted as that of the training that followed.
    """
    shapes, products, forgotten = [], [], []

    def normal(shape, seed):
        shapes.append(shape)
        return tf.zeros([2, 2])

    def matmul(a, b):
        products.append(b)
        return b

    monkeypatch.setattr(tf.random, "stateless_normal", normal)
    monkeypatch.setattr(tf.linalg, "matmul", matmul)
    # No machine that runs this has a GPU.
    monkeypatch.setattr(tf, "device", lambda device: contextlib.nullcontext())
    memory = tf.config.experimental
    monkeypatch.setattr(memory, "get_memory_info", lambda device: {"peak": 7})
    monkeypatch.setattr(memory, "reset_memory_stats", forgotten.append)
    peak_flops(["GPU:0", "GPU:1"])
    assert shapes == [[8192, 8192]] * 2 and len(products) == 2 * 8
    assert forgotten == ["GPU:0", "GPU:1"]


def test_gpus_of_other_processes_have_unknown_memory(monkeypatch):
    """TensorFlow's error ended every run on GPUs of workers."""
    own = "/job:worker/replica:0/task:0/device:GPU:0"

    def get_memory_info(device):
        if device != own:
            raise ValueError(f"No matching devices found for '{device}'")
        return {"peak": 7}

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", get_memory_info)
    assert peak_memory([own, own]) == 7
    assert peak_memory([own, own.replace("task:0", "task:1")]) == 0


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
