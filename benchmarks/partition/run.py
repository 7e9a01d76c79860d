"""Partitions real stacks with pipemesh and with the rules of others, and times large problems.

Run from the repository's root: `python benchmarks/partition/run.py`; README.md says what it needs.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import time

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent)]

from stacks import STACKS  # noqa: E402

from pipemesh.partition import LayerCost, partition  # noqa: E402


def block_partition_file(folder):
    """The one file of torchgpipe that holds its block partition; it needs no PyTorch."""
    found = list(pathlib.Path(folder).glob("**/balance/blockpartition.py"))
    if not found:
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps"]
        command += ["--target", str(folder), "torchgpipe==0.0.7"]
        subprocess.run(command, check=False)
        found = list(pathlib.Path(folder).glob("**/balance/blockpartition.py"))
    return found[0] if found else None


def _solve(path, costs, stages, queue):
    spec = importlib.util.spec_from_file_location("blockpartition", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    queue.put([sum(part) for part in module.solve(costs, partitions=stages)])


def torchgpipe(path, costs, stages, limit):
    """Stage costs of torchgpipe's block partition, or why there are none."""
    if path is None:
        return "not installed"
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_solve, args=(str(path), costs, stages, queue), daemon=True)
    process.start()
    try:
        return queue.get(timeout=limit)
    except Exception:
        return f"no answer in {limit} s" if process.is_alive() else "error"
    finally:
        process.terminate()
        process.join()


def seconds(call, repeats=5):
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


def speed(repeats):
    random = np.random.default_rng(0)
    n = 100_000
    kinds = {
        "equal": np.ones(n),
        "whole numbers": random.integers(1, 1000, n),
        "uniform": random.random(n),
        "log-normal (sigma 1)": random.lognormal(0, 1, n),
        "transformer (two alternating)": np.tile([3.7e12, 1.1e12], n // 2),
        "one huge layer": np.r_[random.random(n - 1), 5000.0],
    }
    rows = []
    for name, costs in kinds.items():
        rows.append(
            (f"100,000 layers, 1,000 stages: {name}", 0.5, lambda c=costs: partition(c, 1000))
        )
    layers = [
        LayerCost(
            float(random.random()),
            backward=None,
            parameter_bytes=float(random.integers(1, 100)) * 1e6,
            activation_bytes=float(random.integers(1, 100)) * 1e5,
            boundary_bytes=float(random.random()) * 1e7,
        )
        for _ in range(10_000)
    ]
    for remat, limit in (("none", 36e9), ("full", 26e9)):
        options = dict(bandwidth=1e8, memory_limit=limit, num_microbatches=16, remat=remat)
        rows.append(
            (
                f"10,000 layers, 64 stages, memory and bandwidth, remat {remat}",
                2.0,
                lambda o=options: partition(layers, 64, **o),
            )
        )
    results = []
    for name, limit, call in rows:
        results.append({"problem": name, "limit_s": limit, "seconds": seconds(call, repeats)})
    return results


def quality(path, limit):
    results = []
    for name, (build, stages) in STACKS.items():
        layers = build()
        row = {"stack": name, "layers": len(layers), "stages": stages}
        totals = [int(layer.total) for layer in layers]
        begin = time.perf_counter()
        exact = partition(layers, stages)
        row["exact_ms"] = 1000 * (time.perf_counter() - begin)
        mean = sum(totals) / stages
        row["exact"] = exact.bottleneck / mean
        for method in ("lingvo", "uniform"):
            plan = partition(layers, stages, method=method)
            row[method] = plan.bottleneck / mean
            row[f"{method}_empty"] = sum(a == b for a, b in itertools.pairwise(plan.boundaries))
        found = torchgpipe(path, totals, stages, limit)
        row["torchgpipe"] = max(found) / mean if isinstance(found, list) else found
        results.append(row)
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--torchgpipe", default=HERE / "torchgpipe", help="folder it is in")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds for torchgpipe")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    path = block_partition_file(args.torchgpipe)

    print(
        f"{'bottleneck over mean stage cost':32}{'S':>4}{'exact':>9}{'lingvo':>9}{'uniform':>9}",
        end="",
    )
    print("  torchgpipe")
    rows = quality(path, args.limit)
    for row in rows:
        other = row["torchgpipe"]
        text = f"{other:.4f}" if isinstance(other, float) else other
        name = f"{row['stack']} ({row['layers']} layers)"
        print(f"{name:32}{row['stages']:4}", end="")
        print(f"{row['exact']:9.4f}{row['lingvo']:9.4f}{row['uniform']:9.4f}  {text}")
    print()
    lists = []
    for costs, stages in (([100] * 6 + [101] * 2, 2), ([1] * 4, 4), ([5, 5, 5, 5, 20, 20], 5)):
        exact = partition(costs, stages).stage_costs
        lingvo = partition(costs, stages, method="lingvo").stage_costs
        other = torchgpipe(path, costs, stages, args.limit)
        lists.append({"costs": costs, "stages": stages, "exact": exact, "lingvo": lingvo})
        lists[-1]["torchgpipe"] = other
        print(f"{costs} over {stages}:\n  exact      {[int(c) for c in exact]}")
        print(f"  lingvo     {[int(c) for c in lingvo]}\n  torchgpipe {other}")
    print()
    times = speed(args.repeats)
    for row in times:
        print(f"{row['problem']:62}{row['seconds']:8.3f} s  (wanted: under {row['limit_s']} s)")
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "cores": os.cpu_count(),
    }
    result = {"machine": machine, "stacks": rows, "lists": lists, "speed": times}
    (HERE / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
