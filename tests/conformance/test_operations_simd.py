"""Every operation as the program of one core equals plain TensorFlow on every core.

Generated from the registry and `tests/lowering/cases`, on up to 8 logical CPU devices that talk to
each other by TensorFlow's collectives. Only the primitives differ from placement, so a case runs
under the few layouts that split most dims: without a graph, each core in its thread, on a small
mesh, each sixth one also on the mesh of axes of two sizes; and each second one as a graph. Cases
that are marked `thin`, which share their code with others, are `exhaustive`, as is the rest. As
graphs, `test_operations_tpu.py` builds all of them.

After an error in a collective all later ones of the process fail: the first failure counts.
"""

import functools

import pytest
import tensorflow as tf

from pipemesh.lowering import Cores
from pipemesh.mesh import LayoutRules, Mesh
from tests.lowering.cases import ALL
from tests.lowering.cases.case import GRAPH_MESH, not_thin, sampled

MOST_LAYOUTS = 5


@functools.cache
def make(mesh_text):
    mesh = Mesh.from_text(mesh_text)
    return Cores(mesh, [f"CPU:{i}" for i in range(mesh.num_devices)], time_limit_s=60)


@pytest.fixture(scope="module", autouse=True)
def unoptimized():
    """Optimizing each program again for each core would take most of the time."""
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": False})


def check(case, layouts, run):
    """Runs all layouts in one program, so that threads and graphs are made once for them."""
    *wanted, cotangent = case.expected
    arrays = [tf.constant(array) for array, _ in case.inputs]

    def program(lowering, *arrays):
        results = []
        for rules in layouts:
            lowering.rules = rules
            results.append(case.run(lowering, arrays, cotangent))
        return results

    for core, results in enumerate(run(program, arrays)):
        for rules, got in zip(layouts, results, strict=True):
            assert not case.differences(got, wanted), f"core {core}, layout '{rules}'"


@pytest.mark.parametrize(
    ("mesh_text", "name"), sampled(ALL, "a:2;b:4", shift=2, every=6, thin=False)
)
def test_eagerly_results_and_gradients_equal_tensorflows(mesh_text, name):
    cores, layouts = make(mesh_text), ALL[name].layouts(mesh_text)[:MOST_LAYOUTS]

    def run(program, arrays):
        return cores.run_eagerly(program, LayoutRules(), [arrays] * len(cores.devices))

    check(ALL[name], layouts, run)


@pytest.mark.parametrize("name", not_thin(ALL, slice(0, None, 2)))
def test_in_a_graph_results_and_gradients_equal_tensorflows(name):
    cores, layouts = make(GRAPH_MESH), ALL[name].layouts(GRAPH_MESH)[:1]

    def run(program, arrays):
        specs = [tf.TensorSpec.from_tensor(array) for array in arrays]
        return cores.function(program, LayoutRules(), *specs)([arrays] * len(cores.devices))

    check(ALL[name], layouts, run)
