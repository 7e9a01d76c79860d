"""Contenders: each computes in a process of its own, whenever it is asked to."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parents[2]


class Contender:
    """A process that answers a line with a line of JSON.

    Its errors are hidden, because TensorFlow writes a lot there; set BENCHMARK_STDERR to see them.

    Args:
        command: what to run, arguments included; it ends in `serve`.
        environment: variables beside those of this process.
    """

    def __init__(self, command: list[str], environment: Mapping[str, str] | None = None) -> None:
        self._command = command
        self._process = subprocess.Popen(
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
        self._process.stdin.close()
        self._process.wait()


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
