"""Every operation and its gradient can be lowered to a TPU's program.

Generated from the registry and `tests/lowering/cases`, under the layout that splits most dims.
"""

import pytest
import tensorflow as tf

from pipemesh.lowering import ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.lowering.cases import ALL
from tests.lowering.legalize import legalize, not_lowered, numbers_after

MESH_TEXT = "a:2;b:4"
MESH = Mesh.from_text(MESH_TEXT)
# Cores that differ along one axis, or along both.
GROUPS = [[[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]], [[*range(8)]]]


def one_axis_apart(source, target):
    return (source // 4 != target // 4) + (source % 4 != target % 4) <= 1


@pytest.mark.parametrize("name", ALL)
def test_forward_and_backward_no_operation_stays(name):
    case = ALL[name]
    *_, cotangent = case.expected
    specs = [tf.TensorSpec(array.shape, array.dtype) for array, _ in case.inputs]
    text = legalize(
        lambda lowering, *arrays: case.run(lowering, arrays, cotangent),
        MESH,
        case.layouts(MESH_TEXT)[0],
        *specs,
    )
    assert "mhlo." in text
    assert not not_lowered(text)
    for groups in numbers_after("replica_groups", text):
        assert sorted(groups) in GROUPS
    for pairs in numbers_after("source_target_pairs", text):
        assert all(one_axis_apart(*pair) for pair in pairs)
        assert all(len({*ends}) == len(pairs) for ends in zip(*pairs, strict=True))


def test_what_is_not_lowered_would_be_found():
    text = legalize(lambda _, x: tf.strings.as_string(x), MESH, LayoutRules(), tf.TensorSpec([2]))
    assert not_lowered(text) == ["AsString"]


def test_groups_are_those_of_the_axis_forward_and_backward():
    def program(lowering, x, w):
        x = ops.import_tensor(lowering, x, "batch:8;io:8")
        w = ops.import_tensor(lowering, w, "io:8;out:8")
        with tf.GradientTape() as tape:
            tape.watch(w.slices)
            y = ops.einsum([x, w], ["batch", "out"])
        return tape.gradient(y.slices, w.slices)

    rules = LayoutRules.from_text("batch:a")
    text = legalize(program, MESH, rules, tf.TensorSpec([8, 8]), tf.TensorSpec([8, 8]))
    # The gradient of the weights is summed over the data-parallel axis; nothing else is sent.
    assert numbers_after("replica_groups", text) == [[[0, 4], [1, 5], [2, 6], [3, 7]]]
    assert text.count("mhlo.cross-replica-sum") == 1


def test_all_to_all_has_the_groups_of_its_axis():
    def program(lowering, x):
        return ops.rename(ops.import_tensor(lowering, x, "x:8;y:8"), {"x": "u", "y": "v"}).slices

    rules = LayoutRules.from_text("x:b;v:b")
    text = legalize(program, MESH, rules, tf.TensorSpec([8, 8]))
    assert text.count("mhlo.all_to_all") == 1
    assert numbers_after("replica_groups", text) == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_shift_sends_to_the_neighbour_and_its_gradient_back():
    def program(lowering, x):
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = lowering.shift((x,), "a", 1, wrap=False)[0]
        return y, tape.gradient(y, x)

    text = legalize(program, MESH, LayoutRules(), tf.TensorSpec([2]))
    up = [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert numbers_after("source_target_pairs", text) == [up, [[b, a] for a, b in up]]
