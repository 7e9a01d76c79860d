"""What devices can compute is measured in products of matrices."""

import resource

import tensorflow as tf

from pipemesh.backend.peak import peak_flops, peak_memory


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
