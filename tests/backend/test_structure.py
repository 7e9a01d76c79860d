"""Nested structures keep their containers, and say where a value does not fit."""

import collections

import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.structure import Structure
from pipemesh.errors import PipelineError

Pair = collections.namedtuple("Pair", "left right")


@pytest.mark.parametrize(
    "value",
    [
        1.0,
        [1.0, (2.0, None)],
        {"b": 1.0, "a": {"c": None, "d": [2.0]}},
        Pair(1.0, {"x": 2.0}),
        py_utils.NestedMap(b=[1.0, None], a=py_utils.NestedMap(z=2.0, y=None)),
        (),
    ],
)
def test_packing_restores_the_containers(value):
    structure = Structure(value, "theta")
    leaves = structure.flatten(value)
    assert None not in leaves and len(leaves) == len(structure.leaf_names)
    packed = structure.pack(leaves)
    assert packed == value and type(packed) is type(value)
    tf.nest.assert_same_structure(packed, value)


def test_dicts_of_other_types_become_the_first_type():
    structure = Structure(py_utils.NestedMap(b=1, a=py_utils.NestedMap(c=2)), "state0")
    leaves = structure.flatten({"a": {"c": 3}, "b": 4})
    assert structure.pack(leaves) == py_utils.NestedMap(b=4, a=py_utils.NestedMap(c=3))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": 1.0, "c": 2.0}, r"state1 .* has state0.a, state0.b; it has state1.a, state1.c"),
        ({"a": 1.0}, "it has state1.a"),
        ({"a": 1.0, "b": [2.0]}, r"it has state1.a, state1.b.0"),
        ((), "it has nothing in it"),
        ({"a": None, "b": 2.0}, "state1.a is None, unlike in state0"),
    ],
)
def test_other_nesting_is_an_error_that_names_both(value, message):
    with pytest.raises(PipelineError, match=message):
        Structure({"a": 1.0, "b": 2.0}, "state0").flatten(value, "state1")


def test_gradients_may_be_none_or_sparse_but_keep_the_dtype():
    structure = Structure({"a": 1.0, "b": 2, "c": 3.0, "d": None}, "theta")
    specs = [tf.TensorSpec([3, 2]), tf.TensorSpec([], tf.int32), tf.TensorSpec([])]
    rows = tf.IndexedSlices(tf.ones([1, 2]), tf.constant([2]), tf.constant([3, 2]))
    given = {"a": rows, "b": tf.constant(0), "c": None, "d": None}
    grads = structure.gradients(specs, given, "dtheta")
    assert grads[0] is rows and grads[1:] == [None, None]
    with pytest.raises(PipelineError, match=r"dtheta.c is float16 .* must be float32"):
        structure.gradients(specs, {**given, "c": tf.ones([], tf.float16)}, "dtheta")
