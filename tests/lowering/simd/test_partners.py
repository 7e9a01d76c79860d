"""What processes hear of others that are missing, killed, or run another program.

In processes of their own, with a time limit: without the checks they would wait for ever.
"""

import functools
import json
import subprocess

import pytest

from tests.recurrent.circular.test_simd_pipeline_cores import free_addresses
from tests.warm import warm

RUNS = [("differ", 0), ("differ", 1), ("leader", 0), ("leader", 1), ("absent", 0)]


@functools.cache
def told():
    """For each run what its process printed, by case."""
    addresses = {todo: ",".join(free_addresses(2)) for todo, _ in RUNS}
    started = {}
    for todo, process in RUNS:
        command = ["-m", "tests.lowering.partner_process", addresses[todo], str(process), todo]
        started[todo, process] = subprocess.Popen(
            warm(*command),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    found = {}
    try:
        for run, process in started.items():
            lines, errors = process.communicate(timeout=200)
            cases = [json.loads(line) for line in lines.splitlines()]
            found[run] = {name: (what, seconds) for name, what, seconds in cases}
            found[run]["errors"] = errors
    finally:
        for process in started.values():
            process.kill()
    return found


def differ(process, case):
    found = told()["differ", process]
    assert case in found, found["errors"][-2000:]
    return found[case][0]


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_processes_with_one_program_compute_together(process):
    assert differ(process, "good") == differ(process, "good again") == [10, 10]


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("program", ["line 5 is 'collective", "all_reduce (sum) over data", "'nothing more'"]),
        ("sizes", ["shape=(2,)", "shape=(1,)"]),
        ("mesh", ["'data:2;model:2'", "'data:4'"]),
    ],
)
def test_all_processes_hear_which_one_has_another_program(process, case, words):
    name, text = differ(process, case)
    assert name == "DeviceError"
    assert text.startswith("process 1 (localhost:")
    assert "built another program than process 0 (localhost:" in text
    assert all(word in text for word in words)


@pytest.mark.slow
def test_a_process_that_cannot_build_its_program_does_not_let_the_others_wait():
    assert differ(1, "failing") == ["KeyError", "'ill'"]
    name, text = differ(0, "failing")
    assert name == "DeviceError"
    assert text.startswith("process 1 (localhost:")
    assert "could not build its program: KeyError: 'ill'" in text


@pytest.mark.slow
@pytest.mark.parametrize("process", [0, 1])
def test_cores_that_two_processes_claim_are_named(process):
    name, text = differ(process, "twice")
    assert name == "DeviceError"
    assert text.startswith("cores 0, 1 are given by process 0 (localhost:")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "case", "missing"),
    [(("differ", 0), "killed", 1), (("leader", 1), "leader", 0)],
)
def test_a_killed_process_is_named_within_a_minute(run, case, missing):
    found = told()[run]
    assert case in found, found["errors"][-2000:]
    (name, text), seconds = found[case]
    assert name == "DeviceError"
    assert f"process {missing} (localhost:" in text
    assert "does not answer any more" in text
    assert seconds < 60


@pytest.mark.slow
def test_a_process_that_never_comes_is_named_when_the_time_limit_is_over():
    (name, text), seconds = told()["absent", 0]["absent"]
    assert name == "DeviceError"
    assert "were not done in 8 s: process 1 (localhost:" in text
    assert "does not answer" in text
    assert seconds < 60
