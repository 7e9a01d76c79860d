"""The solver does not meet TensorFlow, and what goes wrong in its process is one line."""

import subprocess
import sys

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs, exact_process, gpipe
from tests.schedule.test_optimal import with_solver

BESIDE_TENSORFLOW = """
import tensorflow
from pipemesh.schedule import Costs, optimal_schedule
print(optimal_schedule(Costs(), 2, 3, 2).makespan)
"""


@with_solver
@pytest.mark.slow
def test_a_process_that_has_loaded_tensorflow_may_ask():
    """With both in one process it would end in a segmentation fault."""
    command = [sys.executable, "-c", BESIDE_TENSORFLOW]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert float(done.stdout) > 0


def ask():
    start = gpipe(2, 2)
    return exact_process.answer(Costs().per_stage(2), start, (2, 2), 1, workers=1)


def test_a_process_that_fails_is_one_line(monkeypatch):
    monkeypatch.setattr(exact_process, "__name__", "pipemesh.no_such_module")
    with pytest.raises(ScheduleError, match=r"failed with exit code 1: .*no_such_module"):
        ask()


def test_a_process_that_does_not_end_is_one_line(monkeypatch):
    monkeypatch.setattr(exact_process, "_SPARE_SECONDS", -0.99)
    with pytest.raises(ScheduleError, match=r"was to take 1 s, and has not ended after 0\.01 s"):
        ask()
