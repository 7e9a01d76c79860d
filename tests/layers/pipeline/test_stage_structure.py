"""What goes from stage to stage, as flat lists of tensors and back."""

import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.pipeline.stage_structure import StageStructure

A, B, C = tf.constant(1.0), tf.constant([2]), tf.constant("c")


def of(*values, nested_map_fprop=False, what="args"):
    return StageStructure(values, nested_map_fprop, "layer", what)


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ((A, B), ["args.0", "args.1"]),
        (
            (A, None, {"x": B, "n": None}, [C, (A,)]),
            ["args.0", "args.2.x", "args.3.0", "args.3.1.0"],
        ),
        ((py_utils.NestedMap(b=A, a=B),), ["args.0.a", "args.0.b"]),
        ((), []),
    ],
)
def test_values_come_back_as_they_were(values, names):
    structure = of(*values)
    tensors = structure.flatten(values)
    assert structure.leaf_names == names and len(tensors) == len(names)
    packed = structure.pack_arguments(tensors)
    tf.nest.assert_same_structure(packed, values)
    for got, want in zip(tf.nest.flatten(packed), tf.nest.flatten(values), strict=True):
        assert got is want


def test_one_value_is_packed_bare_and_several_are_a_tuple():
    assert of(A).pack([B]) is B
    assert of([A]).pack([B]) == [B]
    one, two = of(A, B).pack([A, B])
    assert one is A and two is B
    assert of().pack([]) == ()


def test_numbers_become_tensors():
    (tensor,) = of(2.5).flatten((2.5,))
    assert isinstance(tensor, tf.Tensor) and tensor.numpy() == 2.5


def test_equal_structures_have_equal_keys():
    key = of({"x": A, "y": [B]}, None).key()
    assert key == of({"y": [C], "x": B}, None).key()
    for other in [
        of({"x": A, "y": (B,)}, None),
        of({"x": A, "y": [B]}, A),
        of({"x": A, "z": [B]}, None),
        of(py_utils.NestedMap(x=A, y=[B]), None),
        of({"x": A, "y": [B]}),
    ]:
        assert other.key() != key


def test_exactly_one_nested_map_where_it_should_be():
    value = py_utils.NestedMap(x=A)
    assert of(value, nested_map_fprop=True).pack([B]).x is B
    for values, given in [((A, None), "tensor, NoneType"), ((), "nothing"), (({"x": A},), "dict")]:
        with pytest.raises(PipelineError, match=f"^layer: nested_map_fprop .* args are {given};"):
            of(*values, nested_map_fprop=True)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (tf.sparse.from_dense([1.0]), r"a SparseTensor; .*: convert it with tf\.sparse\.to_dense"),
        (tf.RaggedTensor.from_tensor([[1.0]]), r"a RaggedTensor; .*: pad it .* to_tensor"),
        (
            tf.IndexedSlices(tf.ones([1, 2]), tf.constant([0])),
            r"an IndexedSlices; .*tf\.convert_to_tensor",
        ),
        ("text", "a str; .*: give a tensor, or make it one of the layer's params"),
        (b"text", "a bytes; .*: give a tensor, or make"),
        (object(), "an object; .*: give tensors"),
    ],
)
def test_what_is_no_dense_tensor_is_an_error_with_a_way_out(value, message):
    with pytest.raises(PipelineError, match=rf"^layer: outputs\.1\.x is {message}"):
        of(A, {"x": value}, what="outputs")


def test_what_comes_later_has_the_same_structure():
    with pytest.raises(PipelineError):
        of(A, B).flatten((A,))
