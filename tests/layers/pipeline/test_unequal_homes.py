"""Stages with sub-meshes of their own: blocks on several devices, and a head on one."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer

from pipemesh.errors import LayoutError, MeshError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer, mesh_cluster
from pipemesh.layers.named import TransformerBlock
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline.test_stage import Residual
from tests.pairwise import in_turn

ROWS, LENGTH, WIDTH = 8, 4, 8
RNG = np.random.default_rng(3)
X = RNG.normal(size=[ROWS, LENGTH, WIDTH]).astype(np.float32)
WEIGHTS = (RNG.uniform(size=[ROWS]) / 64).astype(np.float32)


class Block(base_layer.BaseLayer):
    """A block that hands on what else it is given."""

    def __init__(self, params):
        super().__init__(params)
        block = TransformerBlock.Params().Set(input_dim=WIDTH, num_heads=4, hidden_dim=12)
        self.CreateChild("named_block", block.Set(dropout_rate=0.3))

    def FProp(self, theta, x, *rest):
        y = self.named_block.FProp(theta.named_block, x)
        return (y, *rest) if rest else y


class Head(base_layer.BaseLayer):
    """The squares of each example, summed with its weight."""

    def FProp(self, theta, x, weights):
        each = tf.reduce_sum(x**2, axis=[1, 2])
        return tf.reduce_sum(each * weights), tf.reduce_sum(weights)


def blocks(count, head):
    params = [Block.Params().Set(name=f"named_{i}") for i in range(count)]
    return [*params, Head.Params().Set(name="head")] if head else params


def plain(count, head):
    return FeatureExtractionLayer.Params().Set(name="plain", sub=blocks(count, head))


def stack(count, bounds, head, cls=PipeliningLayer, **kwargs):
    layers = blocks(count, head)
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=layers[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    params = cls.Params().Set(name="stack", cell_tpl=cells)
    if cls is PipeliningLayer:
        params.Set(num_micro_batches=4, loss_inside=head, **kwargs)
    return params


def first(outputs):
    return outputs[0]


@pytest.fixture(scope="module")
def expected():
    """The plain model's results, computed once for each mode."""
    cache = {}

    def get(run, count, head):
        key = run, count, head
        if key not in cache:
            given, loss = ([X, WEIGHTS], {"loss": first}) if head else ([X], {})
            cache[key] = run(plain(count, head), given, **loss)
        return cache[key]

    return get


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "kwargs"),
    in_turn(
        [run_tf1, run_tf2],
        [
            # The head alone, on one device.
            ("layers:2;model:2,1 heads:model;d_ff:model", [0, 2, 3], {"schedule": "1f1b"}),
            ("layers:2;model:4,1 heads:model;d_ff:model", [0, 2, 3], {"schedule": "zb_h1"}),
            ("layers:2;data:2;model:2,1 heads:model;d_ff:model", [0, 2, 3], {"remat": "none"}),
            # From few devices to many, and back.
            ("layers:3;model:1,2,1 heads:model;d_ff:model", [0, 1, 2, 3], {"schedule": "1f1b"}),
            # Two stages a home.
            (
                "layers:2;model:2,1 heads:model;d_ff:model",
                [0, 1, 2, 3, 5],
                {"schedule": "zb_v", "remat": "except_last"},
            ),
            ("layers:2;model:1,2 d_ff:model", [0, 1, 2, 3, 5], {"schedule": "interleaved:2"}),
        ],
    ),
)
def test_everything_equals_the_plain_model_with_dropout_on(run, expected, mesh, bounds, kwargs):
    count = bounds[-1] - 1
    params = stack(count, bounds, head=True, strict_devices=True, **kwargs)
    found = run(params, [X, WEIGHTS], num_devices=mesh, loss=first)
    found.assert_close(expected(run, count, head=True), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("run", "mesh"),
    in_turn(
        [run_tf1, run_tf2, run_eagerly],
        ["layers:2;model:2,1 d_ff:model", "layers:2;model:2,3 d_ff:model"],
    ),
)
@pytest.mark.slow
def test_with_the_loss_outside(run, expected, mesh):
    found = run(stack(2, [0, 1, 2], head=False), [X], num_devices=mesh)
    found.assert_close(expected(run, 2, head=False), rtol=1e-5, atol=2e-5)


def test_without_pipelining():
    params = stack(2, [0, 1, 2], head=False, cls=SeqLayer)
    found = run_tf2(params, [X], num_devices="layers:2;model:2,1 heads:model")
    found.assert_close(run_tf2(plain(2, False), [X]), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mesh",
    [
        "layers:2;sequence:4,1 length:sequence",
        "layers:2;sequence:1,4 length:sequence",
        "layers:2;sequence:2,4 length:sequence",
        "layers:2;sequence:2,1;model:2 length:sequence;d_ff:model",
        "layers:2;sequence:1,2;model:2,1 length:sequence;d_ff:model",
    ],
)
@pytest.mark.slow
def test_activations_that_are_split_are_cut_anew(mesh):
    sub = [Residual.Params().Set(name=f"named_{name}") for name in "ab"]
    cells = [FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=[s]) for i, s in enumerate(sub)]
    params = PipeliningLayer.Params().Set(name="stack", cell_tpl=cells, num_micro_batches=4)
    given = [X[..., :4]]
    wanted = run_tf2(FeatureExtractionLayer.Params().Set(name="plain", sub=sub), given, steps=1)
    run_tf2(params, given, steps=1, num_devices=mesh).assert_close(wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        # What is equal on all devices goes over once.
        ("layers:2;model:4,1 d_ff:model", {(0, 4): 1}),
        ("layers:2;model:1,4 d_ff:model", {(0, 1): 1}),
        # Of what is split each device sends or gets its part.
        ("layers:2;sequence:4,1 length:sequence", {(i, 4): 4 for i in range(4)}),
        ("layers:2;sequence:1,4 length:sequence", {(0, i): 4 for i in range(1, 5)}),
        ("layers:2;sequence:2,4 length:sequence", {(i // 2, 2 + i): 4 for i in range(4)}),
    ],
)
def test_the_boundary_is_crossed_by_the_tensor_once(mesh, ways):
    sub = [Residual.Params().Set(name=f"named_{name}") for name in "ab"]
    cells = [FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=[s]) for i, s in enumerate(sub)]
    params = PipeliningLayer.Params().Set(name="stack", cell_tpl=cells, num_micro_batches=4)
    text, rules = mesh.split()
    with mesh_cluster(Mesh.from_text(text), layout=LayoutRules.from_text(rules)):
        layer = params.Instantiate()
        sent = layer.PredictTransfers(tf.TensorSpec([ROWS, LENGTH, 4], tf.float32))
        memory = layer.PredictMemory(tf.TensorSpec([ROWS, LENGTH, 4], tf.float32))
    found = {
        (t.what, int(t.source[-1]), int(t.target[-1])): t.bytes
        for t in sent
        if t.what in ("activations", "gradients")
    }
    whole = ROWS * LENGTH * 4 * 4
    assert found == {
        **{("activations", a, b): whole // parts for (a, b), parts in ways.items()},
        **{("gradients", b, a): whole // parts for (a, b), parts in ways.items()},
    }
    assert [int(device.device[-1]) for device in memory] == [*range(len(memory))]
    assert len(memory) == Mesh.from_text(text).num_devices


def test_a_plan_says_it_and_is_parsed_back():
    mesh, rules = Mesh.from_text("layers:2;model:4,1"), LayoutRules.from_text("heads:model")
    with mesh_cluster(mesh, layout=rules):
        layer = stack(2, [0, 2, 3], head=True, schedule="1f1b").Instantiate()
        assert [len(home) for home in layer.StageHomes()] == [4, 1]
        assert "mesh=layers:2;model:4,1 " in str(layer.plan)
        assert layer.plan.from_text(str(layer.plan)) == layer.plan


@pytest.mark.parametrize(
    ("mesh", "rules", "error", "text"),
    [
        ("layers:2;model:1,3", "heads:model", LayoutError, "stage 's1'.*'heads'.*size 4.*3 equal"),
        ("layers:2;model:3,1", "heads:model", LayoutError, "stage 's0'.*'heads'.*size 4.*3 equal"),
        ("layers:2;data:2,1", "batch:data", LayoutError, "batch is split over the axis 'data'"),
        (
            "layers:2;data:2;model:2,1",
            "batch:data;d_ff:model;embed:data",
            LayoutError,
            "'embed:data' cuts weights over the axis that the batch",
        ),
    ],
)
def test_what_homes_cannot_have_is_an_error(mesh, rules, error, text):
    params = stack(2, [0, 1, 3], head=True)
    with (
        pytest.raises(error, match=text),
        mesh_cluster(Mesh.from_text(mesh), layout=LayoutRules.from_text(rules)),
    ):
        params.Instantiate()


@pytest.mark.parametrize("head", [False, True])
def test_one_program_for_all_devices_has_homes_of_one_size(head):
    params = stack(2, [0, 1, 2 + head], head, lowering="simd")
    rules = LayoutRules.from_text("d_ff:model")
    with (
        pytest.raises(MeshError, match=r"'layers:2;model:2,1'.*lowering='placement'"),
        mesh_cluster(Mesh.from_text("layers:2;model:2,1"), layout=rules),
    ):
        params.Instantiate()
