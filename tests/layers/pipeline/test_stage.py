"""Stages: lowerings, weights and values."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import lowering_scope
from pipemesh.layers.pipeline.stage import StageStructure, handed_over
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import cluster, run_tf1, run_tf2, squared_sum
from tests.layers.pipeline.named_stacks import WEIGHTS, WIDTH, X, residuals
from tests.layers.stacks import equal_to_plain, first

A, B, C = tf.constant(1.0), tf.constant([2]), tf.constant("c")


def of(*values):
    return StageStructure(values, False, "layer", "outputs")


def test_equal_structures_have_equal_keys():
    key = of({"x": A, "y": [B]}, None).key
    assert key == of({"y": [C], "x": B}, None).key
    for other in [
        of({"x": A, "y": (B,)}, None),
        of({"x": A, "y": [B]}, A),
        of({"x": A, "z": [B]}, None),
        of(py_utils.NestedMap(x=A, y=[B]), None),
        of({"x": A, "y": [B]}),
    ]:
        assert other.key != key


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
        of(A, {"x": value})


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


def stack(bounds=(0, 2, 4), **kwargs):
    return residuals(bounds, fc=(1,), **kwargs)


V = {"schedule": "zb_v", "strict_devices": True}


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "head", "options"),
    [
        (run_tf2, "layers:1;model:4 d_ff:model", [0, 2], False, {"loop": True}),
        (run_tf1, "layers:2;sequence:2 length:sequence", [0, 2, 4], False, {}),
        (run_tf2, "data:2;layers:2;model:2 d_ff:model", [0, 1, 3, 4, 6], True, V),
    ],
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(run, mesh, bounds, head, options):
    inputs, loss = ([X, WEIGHTS], first) if head else ([X], squared_sum)
    equal_to_plain(run, stack(bounds, head=head, **options), inputs, mesh, steps=3, loss=loss)


def test_slices_of_weights_lie_on_the_devices_that_compute_with_them(eagerly):
    with cluster("layers:2;data:2;model:2 d_ff:model"):
        layer = stack().Instantiate()
        homes = [[name[-1] for name in home.devices] for home in layer.StageHomes()]
        feed = layer.s1.named_2.feed_forward
        found = {
            name: (v.device[-1], v.shape.as_list())
            for name, v in feed.vars.items()
            if name[:1] != "d"
        }
    assert homes == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    # Of the two replicas each holds a part of the weights: of the first slices, of the second ones.
    for name, replicas, sizes in (
        ("w_in_slice_0", "46", [WIDTH, 4]),
        ("w_in_slice_1", "57", [WIDTH, 4]),
        ("b_out", "46", [WIDTH]),
    ):
        assert found[name][0] in replicas and found[name][1] == sizes
    assert {device for device, _ in found.values()} == {*"4567"}


def test_a_rule_that_names_no_dim_of_the_layers_is_an_error(eagerly):
    with cluster("layers:2;model:2 d_f:model"):
        with pytest.raises(LayoutError, match=r"stack: .*'d_f'.*did you mean 'd_ff'"):
            stack().Instantiate()


def test_a_stage_whose_devices_idle_is_a_warning(eagerly):
    with cluster("layers:2;model:2 d_ff:model"):
        with pytest.warns(UserWarning, match=r"stage 's1' has no layer with named dims"):
            stack([0, 1, 2]).Instantiate()


def test_a_stack_is_called_under_the_mesh_that_it_was_made_under(eagerly):
    layer = stack().Instantiate()
    with cluster("layers:2;model:2 d_ff:model"):
        with pytest.raises(PipelineError, match=r"for replicas of 1 devices .* on replicas of 2"):
            layer.FPropDefaultTheta(tf.constant(X))
