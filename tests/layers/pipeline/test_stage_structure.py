"""What goes from stage to stage, as flat lists of tensors and back."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import lowering_scope
from pipemesh.layers.pipeline.stage_structure import StageStructure, handed_over
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh

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


def lowering(text):
    mesh = Mesh.from_text(text)
    return PlacementLowering(
        mesh, LayoutRules.from_text("heads:model"), ["CPU:0"] * mesh.num_devices
    )


@pytest.mark.parametrize(
    ("there", "arrivals"),
    [
        # As many devices: slice to slice; fewer and more: pieces; what is equal on all goes once.
        ("model:2", [0, 0, 1, 0, 1]),
        ("model:1", [0, 0, 0, 0]),
        ("model:4", [0, 0, 1, 2, 3, 0]),
    ],
)
def test_tensors_with_named_dims_are_handed_over(there, arrivals):
    here, there = lowering("model:2"), lowering(there)
    split = tf.reshape(tf.range(24.0), [2, 12])
    values = (
        A,
        {"split": ops.import_tensor(here, split, "batch:2;heads:12"), "n": None},
        [ops.import_tensor(here, tf.range(3), "batch:3")],
    )
    values = handed_over(values, there.mesh)
    structure = of(*values)
    assert structure.arrivals() == arrivals
    tensors = structure.flatten(values)
    assert len(tensors) == len(arrivals)
    with lowering_scope(there):
        plain, named, (equal,) = structure.pack_arguments(tensors)
    assert plain is A and named["n"] is None
    assert str(named["split"].shape) == "batch:2;heads:12" and str(equal.shape) == "batch:3"
    np.testing.assert_array_equal(ops.export_tensor(named["split"]), split)
    for part in equal.slices:
        np.testing.assert_array_equal(part, range(3))


def test_a_dim_that_the_next_stage_cannot_split_is_an_error():
    x = ops.import_tensor(lowering("model:2"), tf.zeros([4]), "heads:4")
    with pytest.raises(LayoutError, match=r"'heads' .* has size 4, which axis 'model' .* 3 equal"):
        handed_over((x,), Mesh.from_text("model:3"))
