"""Runs the cases of operations as SIMD programs and prints what differs, a JSON line a case.

A process of its own, because an error in one collective makes all later ones fail. Each line of its
input says what to run, as a JSON triple: mesh, case, and whether as a graph.
"""

import functools
import json
import os
import sys

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import tensorflow as tf

from pipemesh.backend.devices import start_cpu_devices
from pipemesh.lowering.simd.cores import Cores
from pipemesh.mesh import LayoutRules, Mesh
from tests.lowering.cases import ALL

NUM_DEVICES = 8
# Layouts of a case that run without a graph, those that split most dims.
MOST_LAYOUTS = 5


@functools.cache
def expected(name):
    return ALL[name].expected()


@functools.cache
def make_cores(mesh_text):
    mesh = Mesh.from_text(mesh_text)
    return Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)])


def differences(cores, case, in_graph):
    """For each layout what is not equal on one of the cores."""
    mesh_text = str(cores.mesh)
    layouts = case.layouts(mesh_text)[: 1 if in_graph else MOST_LAYOUTS]
    *wanted, cotangent = expected(case.name)
    found = []

    def program(lowering, *arrays):
        """All layouts in one program, so that threads and graphs are made once for them."""

        results = []
        for rules in layouts:
            lowering.rules = rules
            results.append(case.run(lowering, arrays, cotangent))
        if not in_graph:
            compare(results, int(lowering.core))
        return results

    def compare(results, core):
        for rules, got in zip(layouts, results, strict=True):
            for difference in case.differences(got, wanted):
                found.append(f"core {core}, layout '{rules}': {difference}")

    arrays = [tf.constant(array) for array, _ in case.inputs]
    args = [arrays] * len(cores.devices)
    if in_graph:
        specs = [tf.TensorSpec.from_tensor(array) for array in arrays]
        for core, results in enumerate(cores.function(program, LayoutRules(), *specs)(args)):
            compare(results, core)
    else:
        cores.run_eagerly(program, LayoutRules(), args)
    return found


def main():
    start_cpu_devices(NUM_DEVICES)
    # Optimizing each program again for each core would take most of the time.
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    print("ready", flush=True)
    for line in sys.stdin:
        mesh_text, name, in_graph = json.loads(line)
        print(json.dumps(differences(make_cores(mesh_text), ALL[name], in_graph)), flush=True)


if __name__ == "__main__":
    main()
