"""What devices can compute, measured."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Sequence

import tensorflow as tf

# Large enough that neither memory nor the start of an operation counts.
_SIZE = 1024
_ROUNDS = 5


def peak_flops(devices: Sequence[str], dtype: tf.DType = tf.float32) -> float:
    """Flops a second of all devices together, in products of matrices alone.

    Each device multiplies two matrices of 1024 rows, all at the same time; the best of five rounds
    counts. On CPUs it takes a fraction of a second.

    Args:
        devices: names; one that occurs twice counts once.
        dtype: of the matrices.

    Example:
        >>> peak_flops(["CPU:0"]) > 1e8
        True
    """
    devices = list(dict.fromkeys(devices))

    def multiply(*matrices: tf.Tensor) -> list[tf.Tensor]:
        results: list[tf.Tensor] = []
        for device, matrix in zip(devices, matrices, strict=True):
            with tf.device(device):
                # One number: what is brought back to the caller is no part of it.
                results.append(tf.linalg.matmul(matrix, matrix)[0, 0])
        return results

    given: list[tf.Tensor] = []
    for device in devices:
        with tf.device(device):
            given.append(tf.fill([_SIZE, _SIZE], tf.cast(1e-3, dtype)))
    run = tf.function(multiply, autograph=False)
    best = float("inf")
    for _ in range(1 + _ROUNDS):
        begin = time.perf_counter()
        for result in run(*given):
            result.numpy()
        best = min(best, time.perf_counter() - begin)
    return 2 * _SIZE**3 * len(devices) / best


class TensorMemory:
    """What the tensors of a process take, as TensorFlow's allocator counts it.

    All logical CPU devices have one allocator, and each GPU has its own. On CPUs it is counted
    where TensorFlow was built with oneDNN for x86, and of tensors above 256 KiB alone.

    Args:
        device: whose.

    Attributes:
        is_counted: whether anything is known of that device.

    Example:
        >>> memory = TensorMemory("CPU:0")
        >>> memory.forget_peak()
        >>> memory.current <= memory.peak
        True
    """

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
        """Bytes that are taken now; 0 where nothing is known."""
        return self._info()["current"] if self.is_counted else 0

    @property
    def peak(self) -> int:
        """The most bytes since `forget_peak`; 0 where nothing is known."""
        return self._info()["peak"] if self.is_counted else 0

    def forget_peak(self) -> None:
        """Lets the peak be what is taken now."""
        if self.is_counted:
            tf.config.experimental.reset_memory_stats(self._device)


def peak_memory(devices: Sequence[str]) -> int:
    """The most bytes that were in use at once so far.

    Args:
        devices: names. Of GPUs it is what TensorFlow has given out on them, all together; logical
            CPU devices share the memory of the process.

    Example:
        >>> peak_memory(["CPU:0"]) > 1e6
        True
    """
    gpus = [device for device in dict.fromkeys(devices) if "GPU" in device]
    if gpus:
        return sum(tf.config.experimental.get_memory_info(device)["peak"] for device in gpus)
    # In units of 1024 bytes on Linux, of one byte on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
