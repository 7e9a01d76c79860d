"""Stages with sub-meshes of their own: blocks on several devices, and a head on one."""

import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError, MeshError
from pipemesh.layers import SeqLayer
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2, squared_sum
from tests.layers.pipeline.named_stacks import WEIGHTS, X, residuals
from tests.layers.stacks import equal_to_plain, first

pytestmark = pytest.mark.gpu

TWO, V = [0, 1, 2], {"schedule": "zb_v", "remat": "except_last"}
LOOP = {"remat": "none", "loop": True}


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "head", "options"),
    [
        # The head alone, on one device.
        (run_tf1, "layers:2;data:2;model:2,1 d_ff:model", TWO, True, LOOP),
        # From few devices to many, and back.
        (run_tf1, "layers:3;model:1,2,1 d_ff:model", [0, 1, 2, 3], True, {"schedule": "1f1b"}),
        # Two stages a home.
        (run_tf2, "layers:2;model:2,1 d_ff:model", [0, 1, 2, 3, 5], True, V),
        (run_eagerly, "layers:2;model:2,4 d_ff:model", TWO, False, {}),
        (run_tf2, "layers:2;model:2,1 d_ff:model", TWO, False, {"cls": SeqLayer}),
        # Activations that are split are cut anew.
        (run_tf2, "layers:2;sequence:2,4 length:sequence", TWO, False, {}),
    ],
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(run, mesh, bounds, head, options):
    inputs, loss = ([X, WEIGHTS], first) if head else ([X], squared_sum)
    params = residuals(bounds, head, **{"strict_devices": True, **options})
    close = {"rtol": 1e-5, "atol": 2e-6 if head else 2e-5}
    equal_to_plain(run, params, inputs, mesh, loss=loss, **close)


@pytest.mark.parametrize(
    ("mesh", "ways"),
    [
        # What is equal on all devices goes over once.
        ("layers:2;model:4,1 d_ff:model", {(0, 4): 1}),
        # Of what is split each device sends or gets its part.
        ("layers:2;sequence:4,1 length:sequence", {(i, 4): 4 for i in range(4)}),
        ("layers:2;sequence:2,4 length:sequence", {(i // 2, 2 + i): 4 for i in range(4)}),
    ],
)
def test_the_boundary_is_crossed_by_the_tensor_once(mesh, ways):
    with cluster(mesh):
        layer = residuals(TWO).Instantiate()
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
        layer = residuals([0, 2, 3], head=True, schedule="1f1b").Instantiate()
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
        residuals([0, 1, 3], head=True).Instantiate()


@pytest.mark.parametrize("head", [False, True])
def test_one_program_for_all_devices_has_homes_of_one_size(head):
    params = residuals([0, 1, 2 + head], head=head, lowering="simd")
    refused = pytest.raises(MeshError, match=r"'layers:2;model:2,1'.*lowering='placement'")
    with refused, cluster("layers:2;model:2,1 d_ff:model"):
        params.Instantiate()
