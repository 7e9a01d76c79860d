"""How the graph of a step, and the time until it first ran, grow with stages and microbatches.

    python benchmarks/executor/growth.py --schedules one_f_one_b --stages 4,8,16,32,64

Small dense stages, one a device, in the rolled form. Each case has a process of its own.
"""

from __future__ import annotations

import argparse
import itertools
import json
import pathlib
import resource
import subprocess
import sys
import time

from building import WIDTH, dense_stage
from waiting import Table, compiled

from pipemesh.text import columns


def measure(name: str, stages: int, microbatches: int) -> dict[str, float]:
    """Operations, memory, and seconds of the trace, the first step and the second."""
    import numpy as np
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    start_cpu_devices(stages)
    rng = np.random.default_rng(0)
    x = tf.constant(rng.normal(size=[microbatches, WIDTH]).astype(np.float32))
    found: dict[str, float] = {}
    # The first trace of a process imports what later ones find.
    for table in (Table.of("gpipe", 2, 4), Table.of(name, stages, microbatches)):
        shapes = [[WIDTH, WIDTH]] * table.schedule.num_stages
        weights = [tf.Variable(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
        rows = x[: table.schedule.num_microbatches]
        begin = time.perf_counter()
        step = compiled(table, lambda i, t=table: dense_stage(t, i), True, weights, rows)
        traced = time.perf_counter()
        step(rows)
        first = time.perf_counter()
        step(rows)
        found = {
            "actions": table.num_actions,
            "operations": len(step.graph.get_operations()),
            "trace": traced - begin,
            "first": first - traced,
            "second": time.perf_counter() - first,
            "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--schedules", default="one_f_one_b,zb_h1")
    parser.add_argument("--stages", default="4,8,16,32,64", help="places along the axis `layers`")
    parser.add_argument("--each", default="4", help="microbatches a place")
    parser.add_argument("--json", help="write rows there, too")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measure(*json.loads(arguments.case))))
        return
    rows = [
        (
            *("schedule", "places", "microbatches", "actions", "operations", "an action"),
            *("trace", "first step", "both, an action", "second step", "memory"),
        )
    ]
    values = []
    cases = itertools.product(
        arguments.schedules.split(","),
        map(int, arguments.each.split(",")),
        map(int, arguments.stages.split(",")),
    )
    for name, each, stages in cases:
        case = json.dumps([name, stages, each * stages])
        done = subprocess.run(
            [sys.executable, __file__, "--case", case], stdout=subprocess.PIPE, check=True
        )
        found = json.loads(done.stdout)
        values.append({"schedule": name, "places": stages, "each": each, **found})
        begin = found["trace"] + found["first"]
        rows.append(
            (
                name,
                f"{stages}",
                f"{each * stages}",
                f"{found['actions']:,.0f}",
                f"{found['operations']:,.0f}",
                f"{found['operations'] / found['actions']:.2f}",
                f"{found['trace']:.1f} s",
                f"{found['first']:.1f} s",
                f"{1e3 * begin / found['actions']:.2f} ms",
                f"{1e3 * found['second']:.0f} ms",
                f"{found['memory'] / 1e9:.2f} GB",
            )
        )
        print(rows[-1], file=sys.stderr)
    print("\n".join(columns(rows, left=(0,))))
    if arguments.json:
        pathlib.Path(arguments.json).write_text(json.dumps(values, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
