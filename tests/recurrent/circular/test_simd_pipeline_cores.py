"""Pipelines as the program of one core: training equals that of the plain model.

In processes of their own with time limits, because a collective that fails or waits for nobody
breaks its process.
"""

import functools
import json
import socket
import subprocess

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.mesh import Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.recurrent.circular.pipelined import MODELS
from tests.recurrent.circular.pipelined.train import train_placement
from tests.warm import warm

SECONDS = 200
# Model, mesh, microbatches, virtual stages. More combinations of them under placement.
RUNS = [
    ("mlp", "data:2", 1, 1),
    ("mlp", "model:2", 4, 2),
    ("mlp", "layers:2;model:2", 8, 2),
    ("mlp", "layers:4;data:2", 8, 1),
    ("deep_mlp", "layers:4", 1, 2),
    ("deep_mlp", "layers:4;model:2", 4, 2),
    ("transformer", "layers:2;data:2;model:2", 4, 1),
]
TWO_PROCESSES = ("mlp", "layers:2;data:2;model:2", 4, 2)


def start(todo):
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


@functools.cache
def results():
    lines, errors = finish(start({"runs": RUNS}))
    return {tuple(run): found for *run, found in lines}, errors


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", RUNS, ids=str)
def test_training_on_cores_equals_the_plain_model(run):
    done, errors = results()
    assert run in done, f"the process hung or died: {errors}"
    assert not done[run]


def free_addresses(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("localhost", 0))
    addresses = [f"localhost:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return addresses


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_processes_with_four_cores_each_train_as_placement_does(tmp_path):
    addresses = free_addresses(2)
    name, mesh_text, microbatches, virtual = TWO_PROCESSES
    todo = {"runs": [TWO_PROCESSES], "addresses": addresses}
    model = MODELS[name]
    pipeline = SimdPipeline(Mesh.from_text(mesh_text), model.layers, microbatches, virtual)
    histories = train_placement(model, pipeline)
    for i, history in enumerate(histories):
        assert not model.differences(pipeline, i, history)
    arrays = [(i, tf.nest.flatten(history)) for i, history in enumerate(histories)]
    path = tmp_path / "placement.npz"
    np.savez(path, **{f"{i}:{j}": a for i, flat in arrays for j, a in enumerate(flat)})
    todo["expected"] = str(path)
    processes = [start({**todo, "process": i}) for i in range(2)]
    for lines, errors in [finish(process) for process in processes]:
        assert lines == [[*TWO_PROCESSES, []], "as expected"], errors
