"""Trains pipelines as SIMD programs and prints what differs, a JSON line a pipeline.

A process of its own, because an error in one collective makes all later ones fail. Its argument is
JSON: `runs`, a list of mesh, microbatches and virtual stages, and `workers`, the addresses
of those that have the devices. Then `lost`, the process of one of them, is killed, and the error of
the next step is printed.
"""

import json
import os
import signal
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from pipemesh.backend.cluster import connect_workers
from pipemesh.backend.devices import start_cpu_devices
from pipemesh.lowering.simd.cores import Cores
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.recurrent.circular.pipelined_mlp import LAYERS, differences, train_simd

NUM_CORES = 8


def main():
    todo = json.loads(sys.argv[1])
    # Optimizing each program again for each core would take most of the time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    if todo["workers"]:
        devices = connect_workers(todo["workers"])
    else:
        start_cpu_devices(NUM_CORES)
        devices = [f"CPU:{i}" for i in range(NUM_CORES)]
    for mesh_text, microbatches, virtual in todo["runs"]:
        mesh = Mesh.from_text(mesh_text)
        cores = Cores(mesh, devices[: mesh.num_devices])
        pipeline = SimdPipeline(mesh, LAYERS, microbatches, virtual)
        found = []
        for core, history in enumerate(train_simd(pipeline, cores)):
            found += differences(pipeline, core, history)
        print(json.dumps([mesh_text, microbatches, virtual, found]), flush=True)
    if todo["workers"]:
        one_each = [[tf.constant(1.0)]] * cores.mesh.num_devices
        total = cores.function(
            lambda lowering, x: lowering.all_reduce((x,), cores.mesh.axis_names)[0],
            LayoutRules(),
            tf.TensorSpec([]),
        )
        os.kill(todo["lost"], signal.SIGKILL)
        try:
            total(one_each)
        except tf.errors.OpError as error:
            print(json.dumps(type(error).__name__), flush=True)
        os._exit(0)


if __name__ == "__main__":
    main()
