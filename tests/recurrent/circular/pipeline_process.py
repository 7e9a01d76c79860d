"""Trains models as SIMD programs and prints what differs, a JSON line a pipeline.

A process of its own, because an error in one collective makes all later ones fail, or one of
several that talk to each other. Its argument is JSON: `runs`, a list of model, mesh,
microbatches and virtual stages; `addresses` of all processes and `process`, the index of this
one, if there are several; and `expected`, a file with the results of another lowering for the last
run.
"""

import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

from pipemesh.backend.cluster import connect_processes
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.lowering.simd.cores import Cores
from pipemesh.mesh import Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.recurrent.circular.pipelined import MODELS
from tests.recurrent.circular.pipelined.train import train_simd

NUM_CORES = 8


def main():
    todo = json.loads(sys.argv[1])
    addresses, process = todo.get("addresses", []), todo.get("process", 0)
    start_cpu_devices(NUM_CORES // max(1, len(addresses)))
    # Optimizing each program again for each core would take most of the time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    devices = connect_processes(addresses, process) if addresses else None
    made = {}
    for name, mesh_text, microbatches, virtual in todo["runs"]:
        mesh, model = Mesh.from_text(mesh_text), MODELS[name]
        if mesh not in made and devices:
            made[mesh] = Cores(mesh, devices, first_core=process * len(devices))
        elif mesh not in made:
            made[mesh] = Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])
        cores = made[mesh]
        pipeline = SimdPipeline(mesh, model.layers, microbatches, virtual)
        histories = train_simd(model, pipeline, cores)
        found = []
        for core, history in enumerate(histories, cores.first_core):
            found += model.differences(pipeline, core, history)
        print(json.dumps([name, mesh_text, microbatches, virtual, found]), flush=True)
    if "expected" in todo:
        expected = np.load(todo["expected"])
        for core, history in enumerate(histories, cores.first_core):
            for i, array in enumerate(tf.nest.flatten(history)):
                np.testing.assert_allclose(array, expected[f"{core}:{i}"], rtol=1e-4, atol=1e-4)
        print(json.dumps("as expected"), flush=True)


if __name__ == "__main__":
    main()
