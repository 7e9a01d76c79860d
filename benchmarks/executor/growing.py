"""How the graph, the first step and the later ones grow with the number of devices."""

from __future__ import annotations

import resource
import statistics
import time
from typing import Any

import numpy as np
import waiting
from building import WIDTH, dense_stage
from waiting import Clock, Table, compiled, waiting_stage

# Both halves of the first step, tracing and TensorFlow's own work, at the most devices.
BAR = 15.0
MICROBATCHES_A_DEVICE = 4
FORMS = {"default": None, "loop": True, "actions": False}


def measure(name: str, devices: int, form: str, waits: bool) -> dict[str, Any]:
    """One table with small dense stages, or with stages that wait, in a process of its own."""
    import tensorflow as tf

    from pipemesh.backend.devices import prepare_graphs_quickly, start_cpu_devices
    from pipemesh.schedule import simulate

    # As every command does.
    prepare_graphs_quickly()
    start_cpu_devices(devices)
    begin = time.perf_counter()
    table = Table.of(name, devices, MICROBATCHES_A_DEVICE * devices)
    built = time.perf_counter()
    rng, count = np.random.default_rng(0), table.schedule.num_microbatches
    clock = Clock()
    if waits:
        x = tf.constant(rng.normal(size=count).astype(np.float32))
        weights = [tf.Variable(1.0) for _ in range(table.schedule.num_stages)]
    else:
        x = tf.constant(rng.normal(size=[count, WIDTH]).astype(np.float32))
        shape = [WIDTH, WIDTH]
        weights = [
            tf.Variable(rng.normal(size=shape).astype(np.float32))
            for _ in range(table.schedule.num_stages)
        ]

    def stages(of: Table) -> Any:
        return lambda n: waiting_stage(clock, of, n) if waits else dense_stage(of, n)

    # The first trace of a process imports what later ones find.
    small = Table.of("gpipe", 2, count)
    compiled(small, stages(small), False, weights[:2], x)
    start = time.perf_counter()
    step = compiled(table, stages(table), FORMS[form], weights, x)
    traced, seconds = time.perf_counter(), list[float]()
    for _ in range(2 if waits else 4):
        clock.spans.clear()
        before = time.perf_counter()
        tf.nest.map_structure(lambda t: t.numpy(), step(x))
        seconds.append(time.perf_counter() - before)
        if waits:
            waiting._check(clock.spans, table)
            clock.calibrate(table)
    functions = step.graph.as_graph_def().library.function
    return {
        "schedule": name,
        "form": form,
        "devices": devices,
        "waits": waits,
        "actions": table.num_actions,
        "operations": len(step.graph.get_operations()) + sum(len(f.node_def) for f in functions),
        "table": built - begin,
        "trace": traced - start,
        "first_run": seconds[0],
        "step": statistics.median(seconds[1:]),
        "simulated": simulate(table.halved(), table.costs).makespan,
        "megabytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
