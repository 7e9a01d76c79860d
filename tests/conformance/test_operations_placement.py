"""Every operation, under every layout, in one graph for all devices, equals plain TensorFlow.

Generated from the registry and `tests/lowering/cases`. Layouts that differ only by exchanging axes
of one size are run once, a different one for each case. Eager mode runs all others, by default on
the mesh of three axes and a small one. Graphs, which take longer to build, run the two that split
most dims, by default on the mesh of three axes alone; cases that are marked `thin`, which share
their code with others, run under one, on that mesh alone.
"""

import functools

import pytest
import tensorflow as tf

from pipemesh.lowering.placement import PlacementLowering
from pipemesh.lowering.registry import OPS
from pipemesh.mesh import Mesh
from tests.lowering.cases import ALL
from tests.lowering.cases.case import THIN_MESHES, sampled, thinned


@functools.cache
def expected(name):
    return ALL[name].expected()


def make(mesh_text, rules):
    mesh = Mesh.from_text(mesh_text)
    return PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(mesh.num_devices)])


def test_every_operation_has_cases_and_every_case_an_operation():
    import pipemesh.lowering.ops as ops

    assert {case.op for case in ALL.values()} == set(OPS)
    for op in OPS.values():
        assert getattr(ops, op.name) is op.function


@pytest.mark.parametrize(("mesh_text", "name"), sampled(ALL, "a:2;b:2;c:2"))
def test_eagerly_result_and_gradients_equal_those_of_the_whole_tensors(mesh_text, name):
    case = ALL[name]
    *wanted, cotangent = expected(name)
    arrays = [tf.constant(array) for array, _ in case.inputs]
    for rules in case.layouts(mesh_text):
        got = case.run(make(mesh_text, rules), arrays, cotangent)
        assert not case.differences(got, wanted), f"layout '{rules}'"


@pytest.mark.parametrize(("mesh_text", "name"), thinned(ALL, ["a:2", "a:2;b:4", *THIN_MESHES]))
def test_in_a_graph_result_and_gradients_equal_those_of_the_whole_tensors(mesh_text, name):
    case = ALL[name]
    *wanted, cotangent = expected(name)
    layouts = case.thinned_layouts(mesh_text, 2)

    @tf.function(autograph=False)
    def run(*arrays):
        return [case.run(make(mesh_text, rules), arrays, cotangent) for rules in layouts]

    results = run(*(tf.constant(array) for array, _ in case.inputs))
    for rules, got in zip(layouts, results, strict=True):
        assert not case.differences(got, wanted), f"layout '{rules}'"
