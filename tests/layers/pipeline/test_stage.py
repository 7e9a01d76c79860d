"""Stages: lowerings, weights and values."""

import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers import PipeliningLayer, mesh_cluster
from pipemesh.layers.named import FeedForward, NamedLayer, Norm, lowering_scope
from pipemesh.layers.pipeline.stage import StageStructure, handed_over
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline import stacks
from tests.layers.pipeline.stacks import first, stack_of
from tests.pairwise import in_turn

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


WIDTH = 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4, WIDTH]).astype(np.float32)
WEIGHTS = RNG.uniform(size=[8]).astype(np.float32)


class Residual(NamedLayer):
    """Adds what a feed-forward layer makes of the normalized input; hands the rest through."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("norm", Norm.Params().Set(input_dim=WIDTH))
        feed = FeedForward.Params().Set(input_dim=WIDTH, hidden_dim=8, dropout_rate=0.3)
        self.CreateChild("feed_forward", feed.Set(activation="GELU"))

    def FProp(self, theta, x, *rest):
        x = self.Named(x, "batch;length;embed")
        y = self.feed_forward.FProp(theta.feed_forward, self.norm.FProp(theta.norm, x))
        return (x + y, *rest) if rest else x + y


class Plain(base_layer.BaseLayer):
    """A layer of lingvo between named ones."""

    def __init__(self, params):
        super().__init__(params)
        fc = layers.FCLayer.Params().Set(input_dim=WIDTH, output_dim=WIDTH, activation="TANH")
        self.CreateChild("fc", fc)

    def FProp(self, theta, x, *rest):
        assert isinstance(x, tf.Tensor)
        y = self.fc.FProp(theta.fc, x)
        return (y, *rest) if rest else y


class Head(base_layer.BaseLayer):
    """The squares of each example, summed with its weight."""

    def FProp(self, theta, x, weights):
        each = tf.reduce_sum(x**2, axis=[1, 2])
        return tf.reduce_sum(each * weights), tf.reduce_sum(weights)


def sub(head):
    params = [
        Residual.Params().Set(name="named_a"),
        Plain.Params().Set(name="fc_b"),
        Residual.Params().Set(name="named_c"),
        Residual.Params().Set(name="named_d"),
        Residual.Params().Set(name="named_e"),
    ]
    return [*params, Head.Params().Set(name="head")] if head else params


def plain(head=False):
    return stacks.plain(sub(head))


def stack(num_stages, num_micro_batches, head=False, cls=PipeliningLayer, **kwargs):
    bounds = {1: [0, 6], 2: [0, 2, 6], 4: [0, 1, 3, 4, 6]}[num_stages]
    kwargs |= {"num_micro_batches": num_micro_batches, "loss_inside": head}
    return stack_of(sub(head), bounds, cls, **kwargs)


@functools.cache
def expected(run, head=False):
    """The plain model's results, computed once for each mode and end."""
    if head:
        return run(plain(True), [X, WEIGHTS], steps=3, loss=first)
    return run(plain(), [X], steps=3)


@pytest.mark.parametrize(
    ("run", "mesh", "num_stages", "num_micro_batches", "kwargs"),
    in_turn(
        [run_tf1, run_tf2],
        [
            ("model:2;layers:2 d_ff:model", 2, 2, {"remat": "none"}),
            ("layers:1;model:4 d_ff:model", 1, 2, {"loop": True}),
            ("layers:2;sequence:2 length:sequence", 2, 2, {}),
            ("data:2;layers:2;model:2 d_ff:model", 4, 2, {"schedule": "looped_bfs:2"}),
        ],
    ),
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(
    run, mesh, num_stages, num_micro_batches, kwargs
):
    found = run(stack(num_stages, num_micro_batches, **kwargs), [X], steps=3, num_devices=mesh)
    found.assert_close(expected(run), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("run", "schedule"),
    [
        (run_tf2, "zb_v"),
        pytest.param(run_tf1, "zb_h1", marks=pytest.mark.exhaustive),
        pytest.param(run_tf1, "interleaved:2", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.slow
def test_every_schedule_trains_named_layers_on_replicas(run, schedule):
    num_stages = 4 if schedule in ("zb_v", "interleaved:2") else 2
    params = stack(num_stages, 2, head=True, schedule=schedule, strict_devices=True)
    found = run(
        params,
        [X, WEIGHTS],
        steps=3,
        num_devices="layers:2;model:2;data:2 d_ff:model",
        loss=first,
    )
    found.assert_close(expected(run, head=True), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_without_microbatches_and_in_evaluation_it_is_the_same_model():
    mesh = "layers:2;model:2 d_ff:model"
    found = run_tf2(stack(2, 2, pipelined=False), [X], steps=3, num_devices=mesh)
    found.assert_close(expected(run_tf2), rtol=2e-4, atol=2e-5)
    evaluated = [
        run_eagerly(params, [X], num_devices=devices, do_eval=True, loss=None)
        for params, devices in ((stack(2, 2), mesh), (plain(), 1))
    ]
    np.testing.assert_allclose(
        evaluated[0].outputs[0], evaluated[1].outputs[0], rtol=1e-4, atol=1e-5
    )


def test_slices_of_weights_lie_on_the_devices_that_compute_with_them(eagerly):
    rules = LayoutRules.from_text("batch:data;d_ff:model")
    with mesh_cluster(Mesh.from_text("layers:2;data:2;model:2"), layout=rules):
        layer = stack(2, 2).Instantiate()
        homes = [[name[-1] for name in home.devices] for home in layer.StageHomes()]
        feed = layer.s1.named_c.feed_forward
        found = {
            name: (v.device[-1], v.shape.as_list())
            for name, v in feed.vars.items()
            if name[:1] != "d"
        }
    assert homes == [["0", "1", "2", "3"], ["4", "5", "6", "7"]]
    # Of the two replicas each holds a part of the weights: of the first slices, of the second ones.
    replicas = {"w_in_slice_0": "46", "w_in_slice_1": "57", "b_out": "46"}
    for name, sizes in (("w_in_slice_0", [WIDTH, 4]), ("w_in_slice_1", [WIDTH, 4])):
        assert found[name][0] in replicas[name] and found[name][1] == sizes
    assert found["b_out"][0] in replicas["b_out"] and found["b_out"][1] == [WIDTH]
    assert {device for device, _ in found.values()} == {*"4567"}


def test_a_rule_that_names_no_dim_of_the_layers_is_an_error(eagerly):
    rules = LayoutRules.from_text("d_f:model")
    with mesh_cluster(Mesh.from_text("layers:2;model:2"), layout=rules):
        with pytest.raises(LayoutError, match=r"stack: .*'d_f'.*did you mean 'd_ff'"):
            stack(2, 2).Instantiate()


def test_a_stage_whose_devices_idle_is_a_warning(eagerly):
    params = stack(2, 2)
    params.cell_tpl[0].sub = [Plain.Params().Set(name="fc_b")]
    with mesh_cluster(
        Mesh.from_text("layers:2;model:2"), layout=LayoutRules.from_text("d_ff:model")
    ):
        with pytest.warns(UserWarning, match=r"stage 's0' has no layer with named dims"):
            params.Instantiate()


def test_a_stack_is_called_under_the_mesh_that_it_was_made_under(eagerly):
    layer = stack(2, 2).Instantiate()
    layout = LayoutRules.from_text("d_ff:model")
    with mesh_cluster(Mesh.from_text("layers:2;model:2"), layout=layout) as cluster:
        assert cluster.params.layout == layout
        with pytest.raises(PipelineError, match=r"for replicas of 1 devices .* on replicas of 2"):
            layer.FPropDefaultTheta(tf.constant(X))
