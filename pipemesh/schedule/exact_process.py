"""The exact search in a process of its own.

OR-tools and TensorFlow bring libraries of the same names: a process that has loaded TensorFlow 2.21
and then solves with OR-tools 9.15 ends in a segmentation fault. So who asks loads neither.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import json
import os
import subprocess
import sys
from fractions import Fraction
from typing import Any

from pipemesh.errors import ScheduleError, install
from pipemesh.schedule.action import Action
from pipemesh.schedule.costs import StageCosts
from pipemesh.schedule.exact_model import Question
from pipemesh.schedule.schedule import Schedule

Rows = tuple[tuple[Action, ...], ...]
# Beyond the time of the search: to start a process, and to make the model.
_SPARE_SECONDS = 120.0
_SOLVER = "ortools.sat.python.cp_model"


def check_installed() -> None:
    """Checks that there is a solver.

    Raises:
        ScheduleError: there is none; says how to get it.
    """
    try:
        found = importlib.util.find_spec(_SOLVER)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ScheduleError(
            "optimal_schedule needs OR-tools, which is not installed; use list_schedule, or "
            f"{install('optimal')}"
        )


def answer(
    costs: StageCosts, start: Schedule, limits: tuple[int, ...], seconds: float, workers: int
) -> tuple[Rows | None, Fraction]:
    """Asks a `Question`.

    Args:
        costs: in whole ticks; all but transfers are at least 1.
        start: a schedule within the limits.
        limits: for each device the most (stage, microbatch) pairs that it may hold.
        seconds: how long to search at most.
        workers: how many threads.

    Returns:
        As `Question.answer`.

    Raises:
        ScheduleError: the process failed.
    """
    asked = {
        "costs": dataclasses.astuple(costs),
        "rows": [[str(action) for action in row] for row in start.rows],
        "stage_devices": start.stage_devices,
        "num_microbatches": start.num_microbatches,
        "limits": limits,
        "seconds": seconds,
        "workers": workers,
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", __name__],
            input=json.dumps(asked),
            capture_output=True,
            text=True,
            timeout=seconds + _SPARE_SECONDS,
            # What this process imports, the other one is to find, too.
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    except subprocess.TimeoutExpired as error:
        raise ScheduleError(
            f"the exact search was to take {seconds:g} s, and has not ended after "
            f"{error.timeout:g} s; ask for less, or use list_schedule"
        ) from error
    if done.returncode:
        told = done.stderr.strip().splitlines()
        raise ScheduleError(
            f"the exact search failed with exit code {done.returncode}"
            + (f": {told[-1]}" if told else "")
        )
    found = json.loads(done.stdout)
    rows = found["rows"] and tuple(tuple(map(Action.from_text, row)) for row in found["rows"])
    return rows, Fraction(found["bound"])


def main() -> None:
    """Answers what standard input asks."""
    asked: Any = json.load(sys.stdin)
    rows = tuple(tuple(map(Action.from_text, row)) for row in asked["rows"])
    placement, number = tuple(asked["stage_devices"]), asked["num_microbatches"]
    question = Question(
        importlib.import_module(_SOLVER),
        StageCosts(*map(tuple, asked["costs"])),
        placement,
        number,
        asked["limits"],
    )
    start = Schedule(rows, placement, number)
    found, bound = question.answer(start, asked["seconds"], asked["workers"])
    told = None if found is None else [[str(action) for action in row] for row in found]
    print(json.dumps({"rows": told, "bound": str(bound)}))


if __name__ == "__main__":
    main()
