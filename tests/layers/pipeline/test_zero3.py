"""Weights that are cut over the replicas of a stage: stage 3 of ZeRO, by a rule of the layout."""

import collections
import functools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import optimizer, tshape

from pipemesh.backend.saved_state import create_slots
from pipemesh.errors import LayoutError
from pipemesh.layers.named import FeedForward, ReplicaCut, by_logical_name, replica_cut_scope
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import cluster, run_eagerly, run_tf1, run_tf2, squared_sum
from tests.layers.pipeline.named_stacks import WEIGHTS, WIDTH, X, residuals
from tests.layers.stacks import equal_to_plain, first, stack_of

HIDDEN, ROWS, MICROBATCHES = 8, 8, 2
# A feed-forward layer has two matrices and two biases.
MATRICES = 2 * WIDTH * HIDDEN * 4
BIASES = (WIDTH + HIDDEN) * 4


def two_layers(input_dim=WIDTH, **kwargs):
    """A stack of two stages with a feed-forward layer each."""
    feeds = [
        FeedForward.Params().Set(name=f"named_{i}", input_dim=input_dim, hidden_dim=HIDDEN)
        for i in range(2)
    ]
    return stack_of(feeds, [0, 1, 2], num_micro_batches=MICROBATCHES, **kwargs)


@functools.cache
def predicted(mesh, **kwargs):
    """Memory by device, and the bytes that are sent of each kind."""
    with cluster(mesh):
        layer = two_layers(**kwargs).Instantiate()
        rows = tf.TensorSpec([ROWS, 2, WIDTH], tf.float32)
        sent = collections.Counter()
        for transfer in layer.PredictTransfers(rows):
            sent[transfer.what] += transfer.bytes
        return layer.PredictMemory(rows), sent


def fetched_bytes(replicas):
    """What a layer says of the forward pass of a microbatch on one replica."""
    params = FeedForward.Params().Set(name="f", input_dim=WIDTH, hidden_dim=HIDDEN)
    cut = ReplicaCut(Mesh.from_text(f"data:{replicas}"), LayoutRules.from_text("embed:data"))
    with replica_cut_scope(cut):
        return FeedForward.FPropMeta(params, tshape.Shape([ROWS, 2, WIDTH])).fetched_bytes


V, LOOP = {"schedule": "zb_v"}, {"remat": "none", "loop": True}
BY_ACTION = {"schedule": "1f1b", "loop": False}


@pytest.mark.parametrize(
    ("mesh", "bounds", "head", "options"),
    [
        ("model:2;layers:1;data:2 embed:data;d_ff:model", [0, 3], False, LOOP),
        ("layers:2;data:2 embed:data", [0, 1, 2, 3, 4], True, V),
        ("layers:2;data:2 embed:data", [0, 2, 4], True, BY_ACTION),
        ("layers:2;data:2 d_ff:data", [0, 2, 4], False, {"pipelined": False}),
    ],
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(mesh, bounds, head, options):
    inputs, loss = ([X, WEIGHTS], first) if head else ([X], squared_sum)
    params = residuals(bounds, head, fc=(1,), **options)
    found = equal_to_plain(run_tf2, params, inputs, mesh, steps=3, loss=loss)
    assert any("_slice_" in name for name in found.weights)


def test_in_evaluation_it_is_the_same_model():
    params, mesh = residuals([0, 2, 4], fc=(1,)), "layers:2;data:2 embed:data"
    equal_to_plain(run_eagerly, params, [X], mesh, do_eval=True, loss=None)


@pytest.mark.parametrize("mesh", ["layers:2;data:2", "data:4;layers:2"])
def test_each_replica_holds_its_slice_and_the_optimizers_state_of_it(eagerly, mesh):
    with cluster(f"{mesh} d_ff:data"):
        layer = two_layers().Instantiate()
        for name, home in zip(("s0", "s1"), layer.StageHomes(), strict=True):
            variables = layer.children[name].vars.Flatten()
            adam = optimizer.Adam.ParamsB().Set(name="adam").Instantiate().GetOptimizer(0.1)
            create_slots(adam, variables)
            held = collections.Counter()
            for variable in variables:
                if "_slice_" in variable.name:
                    for tensor in (variable, adam.get_slot(variable, "m")):
                        held[tensor.device[-1]] += tensor.shape.num_elements() * 4
            # All but the bias behind the second product has the dim.
            share = (MATRICES + HIDDEN * 4) // len(home)
            assert held == {device[-1]: 2 * share for device in home.devices}


@pytest.mark.parametrize(("replicas", "remat"), [(2, "full"), (4, "none")])
def test_a_device_holds_its_share_and_in_a_step_one_stage(eagerly, replicas, remat):
    """Between two steps it holds its share alone."""
    mesh = f"layers:2;data:{replicas}"
    copied, once = predicted(mesh, remat=remat)
    cut, sent = predicted(f"{mesh} embed:data", remat=remat)
    # The bias before the nonlinearity has no such dim.
    share = (MATRICES + WIDTH * 4) // replicas + HIDDEN * 4
    assert [d.weights for d in copied] == [MATRICES + BIASES] * 2 * replicas
    assert [d.weights for d in cut] == [share] * 2 * replicas
    # From the first action to the last one it also has all of what is cut, joined, once.
    assert {d.fetched for d in copied} == {0}
    assert [d.fetched for d in cut] == [MATRICES + WIDTH * 4] * 2 * replicas
    # Nothing else of them is kept from a forward to its backward pass, and sums are as they were.
    assert [d.kept for d in cut] == [d.kept for d in copied]
    assert [d.gradients for d in cut] == [d.gradients for d in copied]
    others = replicas - 1
    assert once["weights"] == 2 * others * (MATRICES + BIASES)
    forward = MATRICES + WIDTH * 4
    assert fetched_bytes(replicas) == forward * others // replicas
    # Each of the two stages fetches once, for all actions.
    assert sent["weights"] == 2 * others * (forward + HIDDEN * 4)
    assert sent["weight gradients"] == once["weight gradients"] == once["weights"]


@pytest.mark.slow
def test_devices_of_a_replica_get_their_slices_from_those_at_the_same_place(eagerly):
    _, alone = predicted("layers:2;data:2 embed:data")
    cut, sent = predicted("layers:2;data:2;model:2 embed:data;d_ff:model")
    for what in ("weights", "weight gradients"):
        assert sent[what] == alone[what]
    # The first device of each replica has its slice of the second bias, too.
    share, bias = MATRICES // 4 + HIDDEN * 4 // 2, WIDTH * 4 // 2
    assert [d.weights for d in cut] == [share + bias, share] * 4


@pytest.mark.slow
def test_with_a_smaller_dtype_the_casts_are_fetched(eagerly):
    _, whole = predicted("layers:2;data:2 embed:data")
    _, half = predicted("layers:2;data:2 embed:data", fprop_dtype=tf.bfloat16)
    assert half["weights"] == whole["weights"] // 2
    copied, cut = (
        run_eagerly(two_layers(fprop_dtype=tf.bfloat16), [X], num_devices=f"layers:2;data:2{rules}")
        for rules in ("", " embed:data")
    )
    cut.assert_close(copied, rtol=2e-2, atol=2e-2)
    assert all(grad.dtype == np.float32 for grad in cut.grads.values())


@pytest.mark.slow
def test_a_checkpoint_holds_whole_weights_and_goes_from_any_cut_to_any_other(eagerly, tmp_path):
    cuts = [
        "layers:2;data:2 embed:data",
        "layers:2;data:2;model:2 embed:data;d_ff:model",
        "layers:2;data:4 d_ff:data",
        "layers:2;data:2",
    ]
    path, first = str(tmp_path / "weights"), None
    for mesh in [*cuts, cuts[0]]:
        with cluster(mesh):
            layer = two_layers(pipelined=False).Instantiate()
            variables = layer.vars.Flatten()
            tracked = tf.train.Checkpoint(**by_logical_name(layer, variables))
            if first is not None:
                tracked.read(path).assert_consumed()
            y = layer.FPropDefaultTheta(tf.constant(X))
            first = y if first is None else first
            np.testing.assert_allclose(y, first, rtol=1e-5, atol=1e-6)
            tracked.write(path)
    names = {name for name, _ in tf.train.list_variables(path)}
    assert not any("_slice_" in name for name in names)


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("embed:data", r"dim 'embed' .* has size 6, .*axis 'data' .*cannot cut into 4 equal"),
        ("embed:data;d_ff:data", r"dims 'embed' and 'd_ff' .* both split over axis 'data'"),
        ("length:data", r"stack: rule 'length:data' .* cuts weights, but no weight has a dim"),
        ("embd:data", r"stack: .*'embd'.*did you mean 'embed'"),
    ],
)
def test_what_cannot_be_cut_is_an_error(eagerly, layout, text):
    with cluster(f"layers:2;data:4 {layout}"):
        with pytest.raises(LayoutError, match=text):
            two_layers(input_dim=6).Instantiate()


def test_in_a_graph_of_tf1_it_is_an_error():
    with pytest.raises(LayoutError, match=r"cuts weights .* in a TF1 graph .*use TF2"):
        run_tf1(two_layers(), [X], num_devices="layers:2;data:2 embed:data")
