"""Stages with sub-meshes of their own: blocks on several devices, and a head on one."""

import functools

import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, MeshError
from pipemesh.layers import PipeliningLayer, SeqLayer
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2
from tests.layers.pipeline import stacks
from tests.layers.pipeline.stacks import first, stack_of
from tests.layers.pipeline.test_stage import WEIGHTS, Head, Residual, X
from tests.pairwise import in_turn


def blocks(count, head):
    params = [Residual.Params().Set(name=f"named_{i}") for i in range(count)]
    return [*params, Head.Params().Set(name="head")] if head else params


def stack(bounds, head=False, cls=PipeliningLayer, **kwargs):
    layers = blocks(bounds[-1] - head, head)
    return stack_of(layers, bounds, cls, **{"num_micro_batches": 2, "loss_inside": head, **kwargs})


@functools.cache
def expected(run, count, head=False, steps=0):
    """The plain model's results, computed once for each mode."""
    given, loss = ([X, WEIGHTS], {"loss": first}) if head else ([X], {})
    return run(stacks.plain(blocks(count, head)), given, steps=steps, **loss)


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "kwargs"),
    [
        # The head alone, on one device.
        (run_tf2, "layers:2;model:4,1 d_ff:model", [0, 1, 2], {"schedule": "zb_h1"}),
        (run_tf1, "layers:2;data:2;model:2,1 d_ff:model", [0, 1, 2], {"remat": "none"}),
        # From few devices to many, and back.
        (run_tf1, "layers:3;model:1,2,1 d_ff:model", [0, 1, 2, 3], {"schedule": "1f1b"}),
        # Two stages a home.
        (
            *(run_tf2, "layers:2;model:2,1 d_ff:model", [0, 1, 2, 3, 5]),
            {"schedule": "zb_v", "remat": "except_last"},
        ),
        pytest.param(
            *(run_tf1, "layers:2;model:1,2 d_ff:model", [0, 1, 2, 3, 5]),
            {"schedule": "interleaved:2"},
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_everything_equals_the_plain_model_with_dropout_on(run, mesh, bounds, kwargs):
    params = stack(bounds, head=True, strict_devices=True, **kwargs)
    found = run(params, [X, WEIGHTS], num_devices=mesh, loss=first)
    found.assert_close(expected(run, bounds[-1] - 1, head=True), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("run", "mesh"),
    in_turn(
        [run_tf1, run_eagerly],
        ["layers:2;model:2,1 d_ff:model", "layers:2;model:2,4 d_ff:model"],
    ),
)
@pytest.mark.slow
def test_with_the_loss_outside(run, mesh):
    found = run(stack([0, 1, 2]), [X], num_devices=mesh)
    found.assert_close(expected(run, 2), rtol=1e-5, atol=2e-5)


def test_without_pipelining():
    params = stack([0, 1, 2], cls=SeqLayer)
    found = run_tf2(params, [X], num_devices="layers:2;model:2,1 d_ff:model")
    found.assert_close(expected(run_tf2, 2), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize(
    "mesh",
    [
        pytest.param("layers:2;sequence:4,1 length:sequence", marks=pytest.mark.exhaustive),
        pytest.param("layers:2;sequence:1,4 length:sequence", marks=pytest.mark.exhaustive),
        "layers:2;sequence:2,4 length:sequence",
        pytest.param(
            "layers:2;sequence:2,1;model:2 length:sequence;d_ff:model", marks=pytest.mark.exhaustive
        ),
        "layers:2;sequence:1,2;model:2,1 length:sequence;d_ff:model",
    ],
)
@pytest.mark.slow
def test_activations_that_are_split_are_cut_anew(mesh):
    found = run_tf2(stack([0, 1, 2]), [X], steps=1, num_devices=mesh)
    found.assert_close(expected(run_tf2, 2, steps=1), rtol=2e-4, atol=2e-5)


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
    with cluster(mesh):
        layer = stack([0, 1, 2]).Instantiate()
        sent = layer.PredictTransfers(tf.TensorSpec(X.shape, tf.float32))
    found = {
        (t.what, int(t.source[-1]), int(t.target[-1])): t.bytes
        for t in sent
        if t.what in ("activations", "gradients")
    }
    whole = X.size * 4
    assert found == {
        **{("activations", a, b): whole // parts for (a, b), parts in ways.items()},
        **{("gradients", b, a): whole // parts for (a, b), parts in ways.items()},
    }


def test_a_plan_and_a_forecast_know_homes_of_their_own():
    with cluster("layers:2;model:4,1 d_ff:model"):
        layer = stack([0, 2, 3], head=True, schedule="1f1b").Instantiate()
        assert [len(home) for home in layer.StageHomes()] == [4, 1]
        assert "mesh=layers:2;model:4,1 " in str(layer.plan)
        assert layer.plan.from_text(str(layer.plan)) == layer.plan
        memory = layer.PredictMemory(tf.TensorSpec(X.shape), tf.TensorSpec(WEIGHTS.shape))
    assert [int(device.device[-1]) for device in memory] == [*range(5)]


@pytest.mark.parametrize(
    ("mesh", "text"),
    [
        ("layers:2;model:1,3 d_ff:model", "stage 's1'.*'d_ff'.*size 8.*3 equal"),
        ("layers:2;model:3,1 d_ff:model", "stage 's0'.*'d_ff'.*size 8.*3 equal"),
        ("layers:2;data:2,1", "batch is split over the axis 'data'"),
        (
            "layers:2;data:2;model:2,1 d_ff:model;embed:data",
            "'embed:data' cuts weights over the axis that the batch",
        ),
    ],
)
def test_what_homes_cannot_have_is_an_error(mesh, text):
    with pytest.raises(LayoutError, match=text), cluster(mesh):
        stack([0, 1, 3], head=True).Instantiate()


@pytest.mark.parametrize("head", [False, True])
def test_one_program_for_all_devices_has_homes_of_one_size(head):
    params = stack([0, 1, 2 + head], head=head, lowering="simd")
    refused = pytest.raises(MeshError, match=r"'layers:2;model:2,1'.*lowering='placement'")
    with refused, cluster("layers:2;model:2,1 d_ff:model"):
        params.Instantiate()
