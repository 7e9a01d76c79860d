"""Stacks of named layers that get slices of sequences equal those that get whole ones."""

import dataclasses
import functools

import pytest
import tensorflow as tf
from lingvo.core import layers as lingvo_layers
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers import mesh_cluster
from pipemesh.layers.named import Attention, Experts, Norm, TransformerBlock
from pipemesh.layers.pipeline.slices import sliced_positions, takes_slices
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from tests.layers import random_plans
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.pipeline import named_stacks as named
from tests.layers.stacks import first, plain_results

pytestmark = pytest.mark.gpu

INPUTS = random_plans.NAMED_INPUTS
LENGTH = random_plans.LENGTH
SPLIT = "heads:model;d_ff:model;vocab:model"
TURNED = {"use_rotary": True, "use_bias": True}


def language(
    schedule="1f1b", num_micro_batches=2, packed=False, attention=None, bounds=(0, 2, 4), **more
):
    """An embedding, two blocks with attention in blocks of four tokens, and a head."""
    block = random_plans.Attending.Params().Set(packed=packed)
    # The gradient of a bias of keys is nothing but round-off, unless keys are rotated.
    block.attention_tpl.Set(use_bias=False).Set(**(attention or {}))
    layers = named.language_layers(2, block)
    # The norm of a token all of whose elements are dropped makes round-off enormous.
    layers[0].dropout_rate = 0.0
    options = {"lowering": "placement", "num_micro_batches": num_micro_batches, **more}
    return named.language(list(bounds), layers=layers, schedule=schedule, **options)


@functools.cache
def plain(run, packed, attention):
    params = language("seq1f1b:2", packed=packed, attention=dict(attention))
    return plain_results(run, params, INPUTS, loss=first)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "schedule", "given"),
    [
        # One token each: less than a block of keys.
        ("layers:1", "seq1f1b:12", {"num_micro_batches": 1, "bounds": (0, 4)}),
        pytest.param(
            "layers:2",
            "seq1f1b:3",
            {"num_micro_batches": 4, "packed": True, "attention": {"num_kv_heads": 1, **TURNED}},
            marks=pytest.mark.exhaustive,
        ),
        (
            "layers:2",
            "seq1f1b:4",
            {
                **{"attention": {"relative_buckets": 4, "window": 5}, "num_micro_batches": 4},
                **{"remat": "none", "loop": True},
            },
        ),
        pytest.param(
            "layers:2;data:2",
            "seq1f1b:3",
            {"packed": True, "loop": True},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            f"layers:2;model:2 {SPLIT}",
            "seq1f1b:3",
            {"attention": {"num_kv_heads": 1}, "loop": True},
            marks=pytest.mark.exhaustive,
        ),
        # Slices of equal work: of 4, 3, 3 and 2 tokens, or of multiples of 2.
        (
            "layers:2",
            "seq1f1b:4:equal_work",
            {"packed": True, "attention": {"num_kv_heads": 1, **TURNED}},
        ),
        (
            "layers:2;data:2 embed:data",
            "seq1f1b:3:equal_work",
            {
                **{"attention": {"relative_buckets": 4, "window": 5}, "num_micro_batches": 1},
                "remat": "none",
            },
        ),
        pytest.param(
            f"layers:2;model:2 {SPLIT};length:model",
            "seq1f1b:3:equal_work",
            {"packed": True, "attention": {"num_kv_heads": 1, **TURNED}},
            marks=pytest.mark.exhaustive,
        ),
        # Tokens are split between the products alone.
        (
            f"layers:2;model:2 {SPLIT};length:model",
            "seq1f1b:3",
            {"packed": True, "attention": {"num_kv_heads": 1, **TURNED}},
        ),
    ],
)
def test_slices_of_attention_equal_whole_sequences(mesh, schedule, given):
    params = language(schedule, **given)
    found = run_tf2(params, INPUTS, num_devices=mesh, loss=first)
    attention = tuple(sorted(given.get("attention", {}).items()))
    wanted = plain(run_tf2, given.get("packed", False), attention)
    found.assert_close(wanted, **random_plans.CLOSE)


@pytest.mark.slow
def test_slices_in_tf1_equal_whole_sequences():
    params = language("seq1f1b:2", packed=True)
    found = run_tf1(params, INPUTS, num_devices="layers:2", loss=first)
    wanted = plain_results(run_tf1, params, INPUTS, loss=first)
    found.assert_close(wanted, **random_plans.CLOSE)


@pytest.mark.parametrize("schedule", ["seq1f1b:3", "seq1f1b:3:equal_work"])
def test_evaluation_by_slices_equals_that_of_whole_sequences(schedule):
    params = language(schedule, packed=True)
    found = run_tf2(params, INPUTS, num_devices="layers:2", loss=None, do_eval=True)
    wanted = plain_results(run_tf2, params, INPUTS, loss=None, do_eval=True)
    found.assert_close(wanted, **random_plans.CLOSE)


class Renamed(named.Masked):
    """Another `FProp` than its base's, which may look at other positions."""

    def FProp(self, theta, *args):
        return super().FProp(theta, *args)


def made(params):
    with mesh_cluster(Mesh.from_text("layers:1")):
        return params.Set(name="layer").Instantiate()


def test_layers_say_whether_they_take_slices():
    attention = Attention.Params().Set(input_dim=4, num_heads=2)
    block = TransformerBlock.Params().Set(input_dim=4, num_heads=2, hidden_dim=8)
    norm = Norm.Params().Set(input_dim=4)
    for params, wanted in (
        (attention, True),
        (attention.Copy().Set(causal=False), False),
        (block, True),
        (norm, True),
        (norm.Copy().Set(kind="group", num_groups=2), False),
        (Experts.Params().Set(input_dim=4, hidden_dim=8, num_experts=2), False),
        (named.Masked.Params(), True),
        (Renamed.Params(), False),
        (lingvo_layers.FCLayer.Params().Set(input_dim=4, output_dim=4), False),
    ):
        assert takes_slices(made(params)) is wanted, params.cls


def attending(**attention):
    return language("seq1f1b:2", attention=attention)


def other_blocks(block=Renamed, schedule="seq1f1b:2"):
    layers = named.language_layers(2, block.Params())
    return named.language([0, 2, 4], layers=layers, lowering="placement", schedule=schedule)


class Uncounted(named.Masked):
    """Does not say what it costs."""

    @classmethod
    def FPropMeta(cls, p, *shapes):
        raise NotImplementedError


@pytest.mark.parametrize(("stack", "wanted"), [(language, LENGTH), (other_blocks, 0)])
def test_the_planner_is_told_the_positions_that_slices_can_cut(stack, wanted):
    with mesh_cluster(Mesh.from_text("layers:1")):
        made = stack().Instantiate()
        cells = [made.children[cell.name] for cell in made.params.cell_tpl]
        shapes = [None if x is None else tshape.Shape(x.shape) for x in INPUTS]
        assert sliced_positions(cells, shapes) == wanted


class Twice(random_plans.Attending):
    """Calls its attention a second time."""

    takes_slices = True

    def FProp(self, theta, x, *rest):
        x = self.Named(x, "batch;length;embed")
        return super().FProp(theta, x + self.attention.FProp(theta.attention, x), *rest)


@pytest.mark.parametrize(
    ("params", "mesh", "error", "message"),
    [
        (
            lambda: attending(causal=False),
            "layers:2",
            PipelineError,
            r"into 2 slices, and layer '.*named_block0.attention' \(Attention\) does not say",
        ),
        (
            other_blocks,
            "layers:2",
            PipelineError,
            r"layer '.*' \(Renamed\) does not say .* set takes_slices = True in the class$",
        ),
        (
            lambda: other_blocks(Twice),
            "layers:2",
            PipelineError,
            "attention is called twice for a slice .*; make two layers, or give a schedule without",
        ),
        (
            attending,
            "layers:2;cp:2 length:cp",
            LayoutError,
            r"slices, and the rule 'length:cp' splits them over an axis, of which attention does "
            "one alone; leave out the rule, or give a schedule without slices",
        ),
        (
            lambda: language("seq1f1b:5"),
            "layers:2",
            PipelineError,
            "sequences of 12 positions do not divide into them",
        ),
        (
            lambda: language("seq1f1b:13:equal_work"),
            "layers:2",
            PipelineError,
            "cuts sequences of 12 positions into 13 slices of whole multiples of 1. Use at most 12",
        ),
        (
            lambda: language("seq1f1b:3:equal_work", loop=True),
            "layers:2",
            PipelineError,
            "loop=True, and the slices have 5, 4, 3 positions; .* Use loop=None or False, or",
        ),
        (
            lambda: other_blocks(Uncounted, "seq1f1b:2:equal_work"),
            "layers:2",
            PipelineError,
            r"layer 'named_block0' \(Uncounted\) cannot count its own .* Give it an FPropMeta, or",
        ),
    ],
)
def test_what_cannot_be_given_slices_is_refused(params, mesh, error, message):
    with pytest.raises(error, match=message):
        run_tf2(params(), INPUTS, num_devices=mesh, loss=first)


@pytest.mark.parametrize("remat", ["none", "full"])
def test_slices_share_the_keys_of_earlier_ones(remat):
    """Memory by the graph: a slice keeps its share of what whole sequences do."""

    def kept(schedule):
        params = language(schedule, num_micro_batches=2, bounds=(0, 4), remat=remat)
        with mesh_cluster(Mesh.from_text("layers:1")):
            layer = params.Instantiate()
            inputs = [None if x is None else tf.constant(x) for x in INPUTS]
            (device,) = layer.PredictMemory(*inputs)
        return device.stages[0].kept

    rows, count = 4, 3
    whole, of_slice = kept("1f1b"), kept(f"seq1f1b:{count}")
    # Where all is computed again, the input alone is kept; of slices also keys and values, each
    # once for all slices, but those of the last one.
    keys = 2 * 2 * rows * LENGTH * named.WIDTH * 4 * (count - 1) / count**2
    wanted = whole / count + (keys if remat == "full" else 0)
    assert of_slice == pytest.approx(wanted, rel=0.02)


def test_slices_of_equal_work_keep_what_whole_sequences_do():
    """Memory by the graph: one device holds all slices of a microbatch at once."""

    def kept(schedule):
        params = language(schedule, num_micro_batches=1, bounds=(0, 4), remat="none")
        with mesh_cluster(Mesh.from_text("layers:1")):
            layer = params.Instantiate()
            inputs = [None if x is None else tf.constant(x) for x in INPUTS]
            return layer.PredictMemory(*inputs)[0].kept

    assert kept("seq1f1b:3:equal_work") == pytest.approx(kept("1f1b"), rel=0.02)


def test_a_forecast_knows_slices():
    from pipemesh.partition import LayerCost
    from pipemesh.plan import Figures, predict
    from pipemesh.plan.figures import Curve, figures_of_costs

    layers = figures_of_costs([LayerCost(1.0, activation_bytes=100.0)] * 2, rows=1)
    layers = [dataclasses.replace(layer, past=Curve(((1, 12.0),))) for layer in layers]
    figures = Figures(tuple(layers))

    def forecast(schedule):
        plan = Plan("layers:2", schedule=schedule, num_microbatches=2, remat="none")
        return predict(plan, figures, batch=2)

    whole, sliced = forecast("1f1b"), forecast("seq1f1b:4")
    # Eight pieces instead of two microbatches go through two stages.
    assert whole.seconds == pytest.approx(3 * 3.0)
    assert sliced.seconds == pytest.approx((8 + 1) * 3.0 / 4)
    # The second stage holds one microbatch, or its four slices and a gradient of all keys.
    assert whole.memory[1] == pytest.approx(100)
    assert sliced.memory[1] == pytest.approx(100 + 12)
    # The first one has two microbatches, or five slices.
    assert whole.memory[0] == pytest.approx(200)
    assert sliced.memory[0] == pytest.approx(5 / 4 * 100 + 12)
