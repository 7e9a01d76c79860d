"""Every benchmark runs at its smallest size, and ends its processes when it is ended.

It takes minutes: `pytest --cases=all tests/benchmarks/test_all.py`.
"""

import os
import signal
import subprocess
import sys
import time

import pytest

from pipemesh.plan.figures import Figures
from tests.benchmarks.conftest import BENCHMARKS

# Flags of the smallest size; None for what needs more than this machine has, with the reason.
SMALLEST = {
    "change": ["--rounds=1", "--faults", "two microbatches"],
    "checkpoint": ["--megabytes=1", "--variables=4", "--rounds=1", "--products=2"],
    "decode": ["--rounds=1"],
    "executor": ["--parts", "waiting", "--waiting_rounds=1", "--waiting_tables", "gpipe"],
    "finetune": None,  # torch
    "first_step": ["--rounds=1"],
    "gpu": ["--device_type=CPU", "--lm_flags=--model=OneBillionWordTiny", "--rounds=1"],
    "hosts": ["--rounds=1", "--parts=ratios"],
    "lm": ["--rounds=1"],
    "long": [
        *("--lengths", "256", "--rounds=1"),
        *("--plans", "cp:1", "cp:2", "seq1f1b:2", "seq1f1b:2:equal_work"),
    ],
    "memory": ["--counts", "4", "--contenders", "1f1b none", "gpipe none", "lingvo"],
    "mesh": ["--rounds=1"],
    "ngram": None,  # KenLM, which its README builds
    "partition": ["--repeats=1", "--limit=1"],
    "plan": ["--report"],
    "real_text": None,  # a folder of packages
    "scale": ["--figures", str(BENCHMARKS / "plan" / "dense.json")],
    "schedule": [],
    "two_checkouts": [str(BENCHMARKS.parent), "--parts", "memory", "--rounds=1"],
    "vs_lingvo": ["--rounds=1"],
    "weights": ["--small"],
}


def test_every_benchmark_is_here():
    folders = {path.parent.name for path in BENCHMARKS.glob("*/README.md")}
    assert set(SMALLEST) == folders


def test_kept_figures_are_those_of_the_tables():
    """`run.py` without flags failed, as its figures were not in the repository."""
    figures = Figures.read(BENCHMARKS / "scale" / "figures.json")
    told = (BENCHMARKS / "scale" / "README.md").read_text(encoding="utf-8")
    for name, layer in zip(
        ("embedding", "block", "softmax"), [*figures.layers[:2], figures.layers[-1]], strict=True
    ):
        forward, backward = (f"{layer.takes(kind, 1):.3f} s" for kind in "FB")
        weights = f"{layer.parameter_bytes / 1e6:.0f} MB"
        assert f"| {name} | {forward} | {backward} | {weights} |" in told


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [name for name, flags in SMALLEST.items() if flags is not None])
def test_a_benchmark_runs_at_its_smallest_size(name, tmp_path):
    script = BENCHMARKS / name / "run.py"
    out = ["--out", str(tmp_path / "result.json")] if "--out" in script.read_text() else []
    done = subprocess.run(
        [sys.executable, script, *SMALLEST[name], *out],
        **{"capture_output": True, "text": True, "timeout": 1100, "check": False},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_processes_of_a_benchmark_end_with_it(number):
    """`memory` runs two at a time and left them behind."""
    command = [sys.executable, BENCHMARKS / "memory" / "run.py", "--counts", "64"]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not (children := _children(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert children
        process.send_signal(number)
        assert process.wait(timeout=10) != 0
    deadline = time.monotonic() + 10
    while any(map(_runs, children)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_runs, children))


def _children(parent):
    """Processes that a process has started."""
    return [
        int(pid) for pid in os.listdir("/proc") if pid.isdigit() and _stat(pid)[1] == str(parent)
    ]


def _runs(pid):
    return _stat(pid)[0] not in ("Z", "gone")


def _stat(pid):
    """State and parent of a process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii") as file:
            return file.read().rpartition(")")[2].split()[:2]
    except (FileNotFoundError, ProcessLookupError):
        return ["gone", ""]
