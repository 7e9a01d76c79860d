"""The benchmark of the executor measures small dense stages and stages that wait."""

import json
import subprocess

import pytest

from tests.benchmarks.conftest import BENCHMARKS
from tests.warm import warm

PROGRAM = """
import json, sys
sys.path.insert(0, "")
import growing
print(json.dumps(growing.measure("one_f_one_b", 2, "loop", json.loads(sys.argv[1]))))
"""


@pytest.mark.slow
@pytest.mark.parametrize("waits", [pytest.param(False, marks=pytest.mark.exhaustive), True])
def test_growth_is_measured_of_stages_of_both_kinds(waits):
    """Each in a process of its own, which starts its devices."""
    done = subprocess.run(
        warm("-c", PROGRAM, json.dumps(waits)),
        cwd=BENCHMARKS / "executor",
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout.splitlines()[-1])
    assert (row["actions"], row["waits"]) == (2 * 2 * 8, waits)
    assert row["operations"] > 0 and row["trace"] > 0
    if waits:
        assert row["step"] >= row["simulated"]
