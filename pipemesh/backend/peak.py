"""Measured peaks of devices: compute in matrix products, and memory."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import tensorflow as tf

# The size of matrices and the number of products, one after the other. They make memory and the
# start of an operation negligible: a GPU computes a product of size 1024 faster than it starts one.
_SIZE, _CHAIN = {"CPU": 1024, "GPU": 8192}, {"CPU": 1, "GPU": 8}
_ROUNDS = 5


def peak_flops(devices: Sequence[str], dtype: tf.DType = tf.float32) -> float:
    """Returns the flops per second of all devices together in matrix products alone."""
    # Each device multiplies square matrices, all at the same time; the best round counts.
    devices = list(dict.fromkeys(devices))
    kind = "GPU" if all("GPU" in device for device in devices) else "CPU"
    size, chain = _SIZE[kind], _CHAIN[kind]

    def multiply(*inputs: tf.Tensor) -> list[tf.Tensor]:
        results: list[tf.Tensor] = []
        for device, matrix in zip(devices, inputs, strict=True):
            with tf.device(device):
                product = matrix
                for _ in range(chain):
                    product = tf.linalg.matmul(matrix, product)
                # A single number, so that the transfer to the caller takes no time.
                results.append(product[0, 0])
        return results

    matrices: list[tf.Tensor] = []
    for device in devices:
        with tf.device(device):
            # A GPU multiplies constant matrices faster. The scale keeps products finite.
            matrix = tf.random.stateless_normal([size, size], (0, 1)) * size**-0.5
            matrices.append(tf.cast(matrix, dtype))
    run = tf.function(multiply, autograph=False)
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        for result in run(*matrices):
            result.numpy()
        best = min(best, time.perf_counter() - begin)
    del matrices
    for device in devices:
        TensorMemory(device).forget_peak()
    return 2 * size**3 * chain * len(devices) / best


class TensorMemory:
    """The memory of this process's tensors on a device, as TensorFlow's allocator counts it."""

    # All logical CPU devices share one allocator; each GPU has its own. On CPUs TensorFlow counts
    # only if it was built with oneDNN for x86, and only tensors above 256 KiB.

    def __init__(self, device: str) -> None:
        self._device = device
        try:
            self._info()
        except ValueError:
            self.is_counted = False
        else:
            self.is_counted = True

    def _info(self) -> dict[str, int]:
        return tf.config.experimental.get_memory_info(self._device)

    @property
    def current(self) -> int:
        """Bytes in use now; 0 if TensorFlow does not count them."""
        return self._info()["current"] if self.is_counted else 0

    @property
    def peak(self) -> int:
        """The most bytes in use since `forget_peak`; 0 if TensorFlow does not count them."""
        return self._info()["peak"] if self.is_counted else 0

    def forget_peak(self) -> None:
        """Resets the peak to the memory in use now."""
        if self.is_counted:
            tf.config.experimental.reset_memory_stats(self._device)


def peak_memory(devices: Sequence[str]) -> int:
    """Returns the most bytes in use so far, of all GPUs together or of this process on CPUs.

    It is 0, not known, if a GPU belongs to another process.
    """
    gpus = [device for device in dict.fromkeys(devices) if "GPU" in device]
    if gpus:
        try:
            return sum(tf.config.experimental.get_memory_info(device)["peak"] for device in gpus)
        except ValueError:
            # TensorFlow counts the memory of this process's devices alone.
            return 0
    # In units of 1024 bytes on Linux, of one byte on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
