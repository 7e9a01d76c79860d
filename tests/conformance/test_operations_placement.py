"""Every operation, under every layout, in one graph for all devices, equals plain TensorFlow.

Generated from the registry and `tests/lowering/cases`. Layouts that differ only by exchanging axes
of one size are run once, a different one for each case. Eager mode runs all others, on a small mesh
and, each sixth case, on the mesh of three axes. Graphs, which take longer to build, run on a mesh
of two, under the layout that splits most dims, for each second case; those of the others are in
`test_operations_simd.py`. Cases that are marked `thin`, which share their code with others, run
eagerly on a small mesh; the rest is `exhaustive`.
"""

import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.lowering.registry import OPS
from pipemesh.mesh import Mesh
from tests.lowering.cases import ALL
from tests.lowering.cases.case import GRAPH_MESH, LARGE_MESH, not_thin, sampled

MOST_LAYOUTS = 30


def make(mesh_text, rules):
    mesh = Mesh.from_text(mesh_text)
    return PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(mesh.num_devices)])


def test_every_operation_has_cases_and_every_case_an_operation():
    assert {case.op for case in ALL.values()} == set(OPS)
    for op in OPS.values():
        assert getattr(ops, op.name) is op.function


@pytest.mark.parametrize(("mesh_text", "name"), sampled(ALL, LARGE_MESH, every=6))
def test_eagerly_results_and_gradients_equal_tensorflows(mesh_text, name, pytestconfig):
    case = ALL[name]
    *wanted, cotangent = case.expected
    arrays = [tf.constant(array) for array, _ in case.inputs]
    layouts = case.layouts(mesh_text)
    # Of six dims there are 71: an even choice of them, unless all cases run.
    step = 1 if pytestconfig.getoption("cases") == "all" else 1 + len(layouts) // MOST_LAYOUTS
    for rules in layouts[::step]:
        got = case.run(make(mesh_text, rules), arrays, cotangent)
        assert not case.differences(got, wanted), f"layout '{rules}'"


@pytest.mark.parametrize("name", not_thin(ALL, slice(1, None, 2)))
def test_in_a_graph_results_and_gradients_equal_tensorflows(name):
    case = ALL[name]
    *wanted, cotangent = case.expected
    rules = case.layouts(GRAPH_MESH)[0]

    @tf.function(autograph=False)
    def run(*arrays):
        return case.run(make(GRAPH_MESH, rules), arrays, cotangent)

    got = run(*(tf.constant(array) for array, _ in case.inputs))
    assert not case.differences(got, wanted), f"layout '{rules}'"
