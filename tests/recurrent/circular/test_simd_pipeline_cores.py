"""Pipelines as the program of one core of a worker compute what the plain model does.

In a process of its own with a time limit, because a collective that fails or waits for nobody
breaks its process.
"""

import json
import os
import signal
import subprocess
import sys

import pytest
import tensorflow as tf

from pipemesh.backend.cluster import connect_workers
from pipemesh.lowering.simd.cores import Cores
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.hosts.workers import started
from tests.recurrent.circular.pipelined_mlp import LAYERS, differences, on_cores
from tests.warm import warm


def main():
    addresses, lost = json.loads(sys.argv[1])
    # Optimizing each program again for each core would take most of the time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    mesh = Mesh.from_text("layers:2;data:2;model:2")
    cores = Cores(mesh, connect_workers(addresses))
    pipeline = SimdPipeline(mesh, LAYERS, num_microbatches=4, num_virtual_stages=2)
    # A collective may break at the second call.
    for results in on_cores(pipeline, cores):
        print(json.dumps(differences(pipeline, results)), flush=True)
    total = cores.function(
        lambda lowering, x: lowering.all_reduce((x,), mesh.axis_names)[0],
        LayoutRules(),
        tf.TensorSpec([]),
    )
    os.kill(lost, signal.SIGKILL)
    try:
        total([[tf.constant(1.0)]] * mesh.num_devices)
    except tf.errors.OpError as error:
        print(json.dumps(type(error).__name__), flush=True)
    os._exit(0)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_cores_of_workers_equal_the_plain_model_and_a_lost_worker_is_an_error():
    with started(2, "--cpu_devices=4") as (workers, addresses):
        argument = json.dumps([addresses, workers[1].pid])
        child = subprocess.Popen(
            warm("-m", "tests.recurrent.circular.test_simd_pipeline_cores", argument),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            out, errors = child.communicate(timeout=200)
        except subprocess.TimeoutExpired:
            child.kill()
            out, errors = child.communicate()
    assert out.splitlines() == ["[]", "[]", '"UnavailableError"'], errors[-3000:]


if __name__ == "__main__":
    main()
