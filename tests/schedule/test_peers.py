"""Tables as CSV that torch.distributed.pipelining runs, and CSV that it writes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

ROOT = str(pathlib.Path(__file__).parents[2])
SIZE = 3


def test_torch_runs_and_writes_the_same_tables(tmp_path):
    """Losses and gradients are those of the plain model, in both forms of CSV."""
    reason = "torch, to compare with, is not installed: pip install -e '.[dev,peers]'"
    pytest.importorskip("torch.distributed.pipelining", reason=reason)
    command = [sys.executable, "-m", "tests.schedule.peers", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": ROOT, "GLOO_SOCKET_IFNAME": "lo"}
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE)],
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        said = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * SIZE, "\n".join(said)
    for rank in range(SIZE):
        found = json.loads((tmp_path / f"{rank}.json").read_text())
        assert len(found) == 2 * (10 + 2 + 5)
        wrong = {name: value for name, value in found.items() if not value < 1e-5}
        assert not wrong, rank
