"""Pipelines as the program of one core: training equals that of the plain model.

In processes of their own with time limits, because a collective that fails or waits for nobody
breaks its process.
"""

import json
import subprocess

import pytest

from tests.hosts.workers import started
from tests.warm import warm

SECONDS = 200
# Mesh, microbatches, virtual stages. More combinations of them under placement.
RUNS = [("layers:2;model:2", 4, 2), ("layers:2;data:2;model:2", 4, 1)]
ON_WORKERS = ("layers:2;data:2", 4, 2)


def start(runs, workers=(), lost=None):
    todo = {"runs": runs, "workers": workers, "lost": lost}
    return subprocess.Popen(
        warm("-m", "tests.recurrent.circular.pipeline_process", json.dumps(todo)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """Its lines, and the end of its errors; a process that hangs is ended."""
    try:
        out, errors = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        out, errors = process.communicate()
    return [json.loads(line) for line in out.splitlines()], errors[-3000:]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_training_on_cores_equals_the_plain_model():
    lines, errors = finish(start(RUNS))
    assert lines == [[*run, []] for run in RUNS], errors


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cores_of_workers_train_too_and_a_lost_worker_is_an_error():
    with started(2, "--cpu_devices=2") as (workers, addresses):
        lines, errors = finish(start([ON_WORKERS], addresses, workers[1].pid))
    assert lines == [[*ON_WORKERS, []], "UnavailableError"], errors
