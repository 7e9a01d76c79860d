"""A pipelined network and its gradient are lowered to a TPU's program."""

import collections
import functools
import re

import tensorflow as tf

from pipemesh.mesh import Mesh
from pipemesh.recurrent.circular import SimdPipeline
from tests.lowering.legalize import legalize, not_lowered, numbers_after
from tests.recurrent.circular.pipelined_mlp import LAYERS, OWN, rules_of, simd_args, simd_program

MESH = Mesh.from_text("layers:4;data:2;model:2")
# Of four layers.
LAYERS_GROUPS = [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
DATA_GROUPS = [[i, i + 2] for i in (0, 1, 4, 5, 8, 9, 12, 13)]
MODEL_GROUPS = [[i, i + 1] for i in range(0, 16, 2)]
LAYERS_AND_DATA_GROUPS = [list(range(0, 16, 2)), list(range(1, 16, 2))]


def program_text(microbatches):
    pipeline = SimdPipeline(MESH, LAYERS, microbatches)
    specs = [tf.TensorSpec.from_tensor(arg) for arg in simd_args(pipeline, 0)]
    return legalize(simd_program(pipeline), MESH, rules_of(MESH), *specs)


@functools.cache
def text():
    return program_text(4)


def count(word):
    return collections.Counter(str(numbers) for numbers in numbers_after(word, text()))


def test_no_operation_stays_but_the_two_loops():
    assert not not_lowered(text())
    assert text().count('"tf.While"') == 2


def test_activations_go_to_the_next_stage_and_gradients_to_the_one_before():
    up = [[core, (core + 4) % 16] for first in range(4) for core in range(first, 16, 4)]
    down = [[b, a] for a, b in up]

    def in_order(pairs):
        # Group by group of the axis, as the mesh lists them.
        return sorted(pairs, key=lambda pair: min(p % 4 for p in pair))

    found = numbers_after("source_target_pairs", text())
    assert [sorted(pairs) for pairs in found] == [sorted(in_order(up)), sorted(in_order(down))]


def test_sums_have_the_groups_of_their_axes():
    found = count("replica_groups")
    assert set(found) == {
        str(groups) for groups in (LAYERS_GROUPS, DATA_GROUPS, MODEL_GROUPS, LAYERS_AND_DATA_GROUPS)
    }
    # The output of the stack, and the gradient of its input.
    assert found[str(LAYERS_GROUPS)] == 2
    # The weight that all layers share.
    assert found[str(LAYERS_AND_DATA_GROUPS)] == 1


def test_data_parallel_gradients_are_summed_once_and_not_each_tick():
    bodies = [part for part in text().split("func.func") if "while" in part.split("(")[0]]
    assert len(bodies) == 4
    inside = sum(str(DATA_GROUPS) in str(numbers_after("replica_groups", b)) for b in bodies)
    assert inside == 0
    # One for each weight of a layer, the weight before the stack, and the loss.
    assert count("replica_groups")[str(DATA_GROUPS)] == len(OWN) + 2


def test_the_program_does_not_grow_with_the_number_of_microbatches():
    def operations(program):
        # Constants may be shared.
        return len(re.findall(r"mhlo\.(?!constant)", program))

    assert operations(program_text(2)) == operations(text())
