"""Runs lingvo's own test files with pipemesh in the place of `lingvo.core.gpipe` and `.recurrent`.

lingvo's wheel has no tests; they come from a checkout of its sources at the installed version:

    git clone https://github.com/tensorflow/lingvo
    python -m tests.layers.lingvo_suite lingvo

Every file runs in a process of its own. What fails runs again with lingvo's own modules: what
fails with these too says nothing. `--eager` runs all in lingvo's eager mode, file names after the
checkout run these only, `--match` only tests whose name contains a text.
`pipemesh/layers/README.md` has the results.
"""

from __future__ import annotations

import argparse
import collections
import gc
import importlib.machinery
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest
from typing import Any

# Those that import what is replaced, then those of modules that do.
FILES = (
    "core/gpipe_test.py",
    "core/layers_with_gpipe_test.py",
    "core/recurrent_test.py",
    "tasks/lm/layers_test.py",
    "core/layers_test.py",
    "core/py_utils_test.py",
    "core/steps/embedding_steps_test.py",
    "core/builder_layers_test.py",
    "core/conformer_layer_test.py",
    "core/gshard_layers_test.py",
    "core/lstm_frnn_layer_test.py",
    "core/rnn_layers_test.py",
    "core/rnn_cell_test.py",
    "core/step_test.py",
    "core/target_sequence_sampler_test.py",
    "core/batch_major_attention_test.py",
    "tasks/asr/decoder_test.py",
    "tasks/lm/model_test.py",
)


class Checkout:
    """Finds modules of lingvo that the wheel lacks, which tests import."""

    def __init__(self, path: pathlib.Path) -> None:
        self._path = path

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith("lingvo."):
            return None
        folder = self._path.joinpath(*name.split(".")[:-1])
        return importlib.machinery.PathFinder.find_spec(name, [str(folder)], target)


class Recorder(unittest.TestResult):
    """Writes down how each test ended, at once: the process may be ended at any time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    def _write(self, test: Any, outcome: str, detail: str = "") -> None:
        with open(self._path, "a") as file:
            file.write(json.dumps([test.id().split(".", 1)[-1], outcome, detail]) + "\n")

    def startTest(self, test: unittest.TestCase) -> None:
        super().startTest(test)
        self._write(test, "did not end")

    def stopTest(self, test: unittest.TestCase) -> None:
        super().stopTest(test)
        # A test's graph and session are gigabytes at times.
        gc.collect()

    def addSuccess(self, test: unittest.TestCase, err: Any = None) -> None:
        self._write(test, "passed")

    addExpectedFailure = addSuccess

    def addSkip(self, test: unittest.TestCase, reason: str) -> None:
        self._write(test, "skipped")

    def addUnexpectedSuccess(self, test: unittest.TestCase) -> None:
        self._write(test, "failed", "passed unexpectedly")

    def addError(self, test: unittest.TestCase, err: Any) -> None:
        self._write(test, "failed", self._exc_info_to_string(err, test))  # type: ignore[attr-defined]

    addFailure = addError

    def addSubTest(self, test: unittest.TestCase, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            self.addError(test, err)


def run_file(
    checkout: pathlib.Path,
    file: str,
    *,
    with_pipemesh: bool,
    eager: bool,
    match: str,
    only: list[str] | None,
    results: str,
) -> None:
    """Runs one test file in this process."""
    sys.argv = [file, "--enable_eager_execution"] if eager else [file]
    # Also where lingvo's own modules run: its native ops do not load on every system.
    from pipemesh.layers.lingvo_gpipe import replace_gpipe, replace_module

    if with_pipemesh:
        replace_gpipe()
        replace_module("lingvo.core.recurrent", "pipemesh.recurrent")
    from absl import flags
    from lingvo.core import py_utils

    name = "lingvo." + file.removesuffix(".py").replace("/", ".")
    sys.meta_path.append(Checkout(checkout))
    spec = importlib.util.spec_from_file_location(name, checkout / "lingvo" / file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    flags.FLAGS(sys.argv)
    if eager:
        py_utils.SetEagerMode(True)
    tests = tests_of(unittest.TestLoader().loadTestsFromModule(module))
    unittest.TestSuite(
        test
        for test in tests
        if match in test.id() and (only is None or test.id().split(".", 1)[-1] in only)
    ).run(Recorder(results))


def tests_of(suite: Any) -> list[unittest.TestCase]:
    """All tests of a suite of suites."""
    if isinstance(suite, unittest.TestSuite):
        return [test for part in suite for test in tests_of(part)]
    return [suite]


def results_of(file: str, arguments: Any, only: list[str] | None = None) -> dict[str, Any]:
    """Runs one test file in a process of its own: how each test ended, and what it said.

    It runs all tests, with pipemesh's modules, or `only` some with lingvo's own.
    """
    found: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile("r", suffix=".jsonl") as lines:
        child = {
            "file": file,
            "with_pipemesh": only is None,
            "eager": arguments.eager,
            "match": arguments.match,
            "only": only,
            "results": lines.name,
        }
        command = [sys.executable, "-m", "tests.layers.lingvo_suite", str(arguments.checkout)]
        with tempfile.TemporaryFile("w+") as output:
            process = subprocess.Popen(
                [*command, "--child", json.dumps(child)],
                stdout=output,
                stderr=output,
                env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
            )
            try:
                process.wait(arguments.timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            output.seek(0)
            said = output.read()
        for line in lines:
            test, outcome, detail = json.loads(line)
            if found.get(test, ("did not end",))[0] != "failed":
                found[test] = (outcome, detail)
    if not found and process.returncode:
        found["(import)"] = ("failed", said[-4000:])
    return found


def last_line(detail: str) -> str:
    """What a traceback ends with."""
    lines = [line for line in detail.strip().splitlines() if line and not line.startswith(" ")]
    return (lines or ["did not end in time"])[-1][:300]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("checkout", type=pathlib.Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--match", default="")
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds a file")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.checkout = arguments.checkout.resolve()
    if arguments.child:
        run_file(arguments.checkout, **json.loads(arguments.child))
        return
    print("| file | tests | skipped | pass | fail with lingvo's modules too | fail |", flush=True)
    print("|---|---|---|---|---|---|", flush=True)
    for file in arguments.files:
        pipemesh = results_of(file, arguments)
        bad = {t: r for t, r in pipemesh.items() if r[0] not in ("passed", "skipped")}
        lingvo = results_of(file, arguments, list(bad)) if bad else {}
        both = [test for test in bad if lingvo.get(test, ("passed",))[0] != "passed"]
        counts = collections.Counter(outcome for outcome, _ in pipemesh.values())
        print(
            f"| `{file}` | {len(pipemesh)} | {counts['skipped']} | {counts['passed']} "
            f"| {len(both)} | {len(bad) - len(both)} |",
            flush=True,
        )
        for test, (outcome, detail) in bad.items():
            if test not in both:
                print(f"  {test} {outcome}: {last_line(detail)}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
