"""Stacks of layers with named dims, split over several axes of a mesh, equal the plain stack."""

import itertools

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, layers

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer, mesh_cluster
from pipemesh.layers.named import FeedForward, NamedLayer, Norm
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import run_eagerly, run_tf1, run_tf2
from tests.pairwise import in_turn

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
    return FeatureExtractionLayer.Params().Set(name="plain", sub=sub(head))


def stack(num_stages, num_micro_batches, head=False, cls=PipeliningLayer, **kwargs):
    params = sub(head)
    bounds = {1: [0, 6], 2: [0, 2, 6], 4: [0, 1, 3, 4, 6]}[num_stages]
    cells = [
        FeatureExtractionLayer.Params().Set(name=f"s{i}", sub=params[a:b])
        for i, (a, b) in enumerate(itertools.pairwise(bounds))
    ]
    params = cls.Params().Set(name="stack", cell_tpl=cells)
    if cls is PipeliningLayer:
        params.Set(num_micro_batches=num_micro_batches, loss_inside=head, **kwargs)
    return params


@pytest.fixture(scope="module")
def expected():
    """The plain model's results, computed once for each mode and end."""
    cache = {}

    def get(run, head=False):
        if (run, head) not in cache:
            given = [X, WEIGHTS] if head else [X]
            loss = {"loss": lambda outputs: outputs[0]} if head else {}
            cache[run, head] = run(plain(head), given, steps=3, **loss)
        return cache[run, head]

    return get


@pytest.mark.parametrize(
    ("run", "mesh", "num_stages", "num_micro_batches", "kwargs"),
    in_turn(
        [run_tf1, run_tf2],
        [
            ("model:4;layers:2 d_ff:model", 2, 4, {"remat": "none"}),
            ("layers:1;model:2 d_ff:model", 1, 4, {"loop": True}),
            ("layers:2;model:2;sequence:2 d_ff:model;length:sequence", 2, 2, {}),
            ("data:2;layers:2;model:2 d_ff:model", 4, 4, {"schedule": "looped_bfs:2"}),
        ],
    ),
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(
    run, expected, mesh, num_stages, num_micro_batches, kwargs
):
    found = run(stack(num_stages, num_micro_batches, **kwargs), [X], steps=3, num_devices=mesh)
    found.assert_close(expected(run), rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("run", "schedule"), in_turn([run_tf1, run_tf2], ["zb_h1", "zb_v", "interleaved:2"])
)
@pytest.mark.slow
def test_every_schedule_trains_named_layers_on_replicas(run, expected, schedule):
    num_stages = 4 if schedule in ("zb_v", "interleaved:2") else 2
    params = stack(num_stages, 2, head=True, schedule=schedule, strict_devices=True)
    found = run(
        params,
        [X, WEIGHTS],
        steps=3,
        num_devices="layers:2;model:2;data:2 d_ff:model",
        loss=lambda outputs: outputs[0],
    )
    found.assert_close(expected(run, head=True), rtol=2e-4, atol=2e-5)


@pytest.mark.slow
def test_without_microbatches_and_in_evaluation_it_is_the_same_model(expected):
    mesh = "layers:2;model:2 d_ff:model"
    for params in (stack(2, 2, pipelined=False), stack(2, 2, cls=SeqLayer)):
        found = run_tf2(params, [X], steps=3, num_devices=mesh)
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


@pytest.mark.parametrize(
    ("layout", "text"),
    [
        ("d_ff:layers", r"'d_ff' over the axis 'layers', along which the stages lie"),
        ("batch:layers", "splits the batch over the axis 'layers'"),
    ],
)
def test_dims_are_split_over_axes_of_their_own(layout, text):
    mesh = Mesh.from_text("layers:2;data:2")
    with pytest.raises(LayoutError, match=text):
        mesh_cluster(mesh, layout=LayoutRules.from_text(layout))


def test_a_stack_is_called_under_the_mesh_that_it_was_made_under(eagerly):
    layer = stack(2, 2).Instantiate()
    layout = LayoutRules.from_text("d_ff:model")
    with mesh_cluster(Mesh.from_text("layers:2;model:2"), layout=layout) as cluster:
        assert cluster.layout == layout
        with pytest.raises(PipelineError, match=r"for replicas of 1 devices .* on replicas of 2"):
            layer.FPropDefaultTheta(tf.constant(X))
