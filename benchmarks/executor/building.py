"""What it takes until a schedule runs: tracing its graph, and TensorFlow's own work before it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from waiting import FORMS, TABLES, Table, compiled

WIDTH = 4  # Small, so that computing takes next to no time.


def dense_stage(table: Table, number: int) -> Any:
    """Dense and tanh; the last stage ends in a sum."""
    import tensorflow as tf

    def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        del carry, microbatch, step
        y = tf.tanh(tf.matmul(inputs[0], theta[0]))
        return [tf.reduce_sum(y) if number == table.schedule.num_stages - 1 else y], []

    return forward


def measure(devices: int, microbatches: int) -> Iterator[dict[str, Any]]:
    """For each table and form, one row of the result."""
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    start_cpu_devices(devices)
    rng = np.random.default_rng(0)
    # The first trace of a process imports what later ones find.
    tables = [Table.of(name, devices, microbatches) for name in TABLES]
    for table in [Table.of("gpipe", 2, microbatches), *tables]:
        x = tf.constant(rng.normal(size=[*table.batch, WIDTH]).astype(np.float32))
        weights = [
            tf.Variable(rng.normal(size=[WIDTH, WIDTH]).astype(np.float32))
            for _ in range(table.schedule.num_stages)
        ]
        for form, loop in FORMS.items():
            begin, cpu = time.perf_counter(), time.process_time()
            step = compiled(table, lambda i, t=table: dense_stage(t, i), loop, weights, x)
            traced = time.perf_counter()
            step(x)
            first, cpu = time.perf_counter(), time.process_time() - cpu
            step(x)
            second = time.perf_counter()
            if table.schedule.num_devices == devices:
                yield {
                    "schedule": table.name,
                    "form": form,
                    "actions": table.num_actions,
                    "operations": len(step.graph.get_operations()),
                    "trace": traced - begin,
                    "first_run": (first - traced) - (second - first),
                    "run": second - first,
                    "cpu": cpu,
                }
