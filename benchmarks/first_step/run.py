"""Seconds until one step is trained, evaluated and saved: two checkouts in turn."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CASES = {
    "layers:1": ["--mesh_shape=layers:1"],
    "layers:2, 8 microbatches": ["--mesh_shape=layers:2", "--num_microbatches=8"],
    "layers:4, zb_h1, 16 microbatches": [
        *("--mesh_shape=layers:4", "--schedule=zb_h1", "--num_microbatches=16")
    ],
}
BAR = 0.5


def seconds_of(checkout: pathlib.Path, flags: list[str]) -> float:
    """Wall seconds of the whole command, with a checkout's modules and a folder of its own."""
    with tempfile.TemporaryDirectory() as logdir:
        command = [sys.executable, "-m", "models.one_billion_word.train", *flags]
        begin = time.perf_counter()
        subprocess.run(
            [*command, "--steps=1", "--eval_batches=1", f"--logdir={logdir}"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout), "TF_CPP_MIN_LOG_LEVEL": "3"},
            check=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=pathlib.Path, nargs="?", help="another checkout")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(pathlib.Path(__file__).with_name("result.json")))
    arguments = parser.parse_args()
    checkouts = {"this": ROOT}
    if arguments.other:
        checkouts = {"other": arguments.other.resolve(), **checkouts}
    seconds: dict[str, dict[str, list[float]]] = {
        case: {name: [] for name in checkouts} for case in CASES
    }
    for _ in range(arguments.rounds):
        for case, flags in CASES.items():
            for name, checkout in checkouts.items():
                seconds[case][name].append(seconds_of(checkout, flags))
    print(f"seconds, medians of {arguments.rounds} rounds in turn")
    for case, found in seconds.items():
        line = "  ".join(f"{name} {statistics.median(s):5.1f}" for name, s in found.items())
        if arguments.other:
            ratio = statistics.median(
                mine / theirs for mine, theirs in zip(found["this"], found["other"], strict=True)
            )
            line += f"  ratio {ratio:.2f} (bar {BAR}: {'met' if ratio <= BAR else 'NOT met'})"
        print(f"{case:34} {line}")
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    result = {"machine": machine, "python": platform.python_version(), "seconds": seconds}
    pathlib.Path(arguments.out).write_text(json.dumps(result, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
