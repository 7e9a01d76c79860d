"""Contenders: each computes in a process of its own, whenever it is asked to."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shared.children import start
from shared.resident import resident

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Contender:
    """A process that answers a line with a line of JSON.

    Its errors are hidden, because TensorFlow writes a lot there; set BENCHMARK_STDERR to see them.

    Args:
        command: what to run, arguments included; it ends in `serve`.
        environment: variables beside those of this process.

    Attributes:
        peak_bytes: the most memory that it held, once it is closed; None where the system does not
            say.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._process = start(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("BENCHMARK_STDERR") else subprocess.DEVNULL,
            text=True,
            env={
                **os.environ,
                "TF_CPP_MIN_LOG_LEVEL": "3",
                "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
                **(environment or {}),
            },
        )

    def ask(self) -> Any:
        """What the process answers."""
        with contextlib.suppress(BrokenPipeError):  # If it has ended, reading says so.
            self._process.stdin.write("\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(
                f"{' '.join(self._command)} ended early, exit code {self._process.wait()}; "
                "set BENCHMARK_STDERR=1 to see why"
            )
        return json.loads(line)

    def close(self) -> None:
        """Ends the process."""
        self.peak_bytes = resident(self._process.pid).get("VmHWM")
        self._process.stdin.close()
        self._process.wait()


def take_turns(
    contenders: Mapping[str, Contender], rounds: int, reference: str, other: Sequence[str] = ()
) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, list[float]]]:
    """Has contenders that `serve_timed` compute one step a round, while the others wait.

    They warm up with three steps, and are closed in the end.

    Args:
        contenders: by name.
        rounds: that are timed.
        reference: whose results all must have.
        other: those who compute something else.

    Returns:
        Of each contender the seconds and the CPU seconds of its steps, and its results.
    """
    results = {}
    for name, contender in contenders.items():
        for _ in range(3):
            _, _, *results[name] = contender.ask()
    for name in results.keys() - set(other):
        for mine, wanted in zip(results[name], results[reference], strict=True):
            if abs(mine - wanted) > 1e-3 * abs(wanted):
                raise SystemExit(f"{name} does not compute what {reference} does: {results}")
    seconds = {name: [] for name in contenders}
    cpu_seconds = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, contender in contenders.items():
            wall, cpu, *_ = contender.ask()
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    for contender in contenders.values():
        contender.close()
    return seconds, cpu_seconds, results


def serve(answer: Callable[[], Any]) -> None:
    """Answers line by line until the input ends."""
    for _ in sys.stdin:
        print(json.dumps(answer()), flush=True)


def serve_timed(step: Callable[[], tuple[float, ...]]) -> None:
    """Answers with seconds, CPU seconds and what a step computed."""

    def timed() -> list[float]:
        begin, cpu = time.perf_counter(), time.process_time()
        results = step()
        return [time.perf_counter() - begin, time.process_time() - cpu, *results]

    serve(timed)
