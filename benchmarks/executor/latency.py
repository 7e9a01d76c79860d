"""What lies between two actions: the time from when a cell could start until it does, part by part.

    python benchmarks/executor/latency.py

A chain of cells that note when they begin and end, and sleep 2 ms each; between two of them
nothing, what the executor puts there, or another device.
"""

from __future__ import annotations

import pathlib
import statistics
import sys
import time

import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

LENGTH, ROUNDS, SLEEP = 40, 15, 2e-3


def main() -> None:
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices
    from pipemesh.backend.operations import pin

    start_cpu_devices(8)
    times: list[tuple[float, float]] = []

    def sleep(x: np.ndarray) -> np.ndarray:
        begin = time.perf_counter()
        time.sleep(SLEEP)
        times.append((begin, time.perf_counter()))
        return x

    def python_cell(x: tf.Tensor) -> tf.Tensor:
        y = tf.numpy_function(sleep, [x], tf.float32, stateful=False)
        y.set_shape([4])
        return y

    def pinned(x: tf.Tensor) -> tf.Tensor:
        return pin([x, x])[0]

    def gated(x: tf.Tensor) -> tf.Tensor:
        """As between two actions: results pinned, and a gate that waits for them."""
        result = pin([x, x])
        with tf.control_dependencies([result[0].op]):
            return pin([result[0], result[1]])[0]

    cases = {
        "nothing": lambda x, i: x,
        "one pin": lambda x, i: pinned(x),
        "pin and gate, as between two actions": lambda x, i: gated(x),
        "pin and gate, and another device": lambda x, i: gated(x),
    }
    for name, between in cases.items():

        @tf.function(autograph=False)
        def run(x: tf.Tensor, name: str = name, between=between) -> tf.Tensor:
            for i in range(LENGTH):
                with tf.device(f"CPU:{i % 8 if 'another' in name else 0}"):
                    x = python_cell(between(x, i))
            return x

        found = []
        for _ in range(ROUNDS):
            times.clear()
            run(tf.ones([4]))
            ends = times[:-1]
            found += [b[0] - a[1] for a, b in zip(ends, times[1:], strict=True)]
        print(f"{name:40} {1e3 * statistics.median(found):.3f} ms")


if __name__ == "__main__":
    main()
