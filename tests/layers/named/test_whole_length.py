"""Activations split along `length` over the axis of the heads."""

import numpy as np
import pytest
from lingvo.core import tshape

from pipemesh.errors import LayoutError
from pipemesh.layers import FeatureExtractionLayer, PipeliningLayer, SeqLayer
from pipemesh.layers.named import TransformerBlock, lowering_scope
from pipemesh.layers.named.whole_length import split_names, whole_dims, whole_names
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from tests.layers.harness import run_tf1, run_tf2
from tests.layers.named.harness import value_of

BATCH, LENGTH, EMBED, HIDDEN = 4, 8, 16, 32
MEGATRON = "heads:model;d_ff:model"
SPLIT = f"length:model;{MEGATRON}"
X = value_of("x", [BATCH, LENGTH, EMBED])


def block(**changes):
    return TransformerBlock.Params().Set(
        name="block", input_dim=EMBED, num_heads=4, hidden_dim=HIDDEN, **changes
    )


def meta(layout, size):
    mesh = Mesh.from_text(f"model:{size}")
    lowering = PlacementLowering(
        mesh, LayoutRules.from_text(layout), [f"CPU:{i}" for i in range(size)]
    )
    with lowering_scope(lowering):
        params = block(dropout_rate=0.1)
        return TransformerBlock.FPropMeta(params, tshape.Shape([BATCH, LENGTH, EMBED]))


@pytest.mark.parametrize("size", [2, 4])
def test_it_sends_what_megatrons_four_all_reduces_send(size):
    whole, split = meta(MEGATRON, size).communication, meta(SPLIT, size).communication
    activation = BATCH * LENGTH * EMBED * 4
    share = activation * (size - 1) // size
    axes = ("model",)
    assert whole.rows == {
        (axes, "all_reduce", "forward"): (2, 2 * 2 * share),
        (axes, "all_reduce", "backward"): (2, 2 * 2 * share),
    }
    # Gradients of what is added to parts of tokens, or scales them: 2 norms and 2 biases.
    vectors = 6
    assert split.rows == {
        **{
            (axes, primitive, which): (2, 2 * share)
            for primitive in ("all_gather", "reduce_scatter")
            for which in ("forward", "backward")
        },
        (axes, "all_reduce", "backward"): (vectors, vectors * 2 * EMBED * 4 * (size - 1) // size),
    }


def test_less_is_kept_for_the_backward_pass():
    whole, split = meta(MEGATRON, 4).activation_bytes, meta(SPLIT, 4).activation_bytes
    # Of each: two normalized tensors, their scales, and two masks, which four devices had.
    tokens = BATCH * LENGTH
    assert whole - split == 3 * 2 * (tokens * EMBED * 4 + tokens * 4 + tokens * EMBED)


def test_names_of_dims():
    rules = LayoutRules.from_text(SPLIT)
    assert whole_names(rules, "heads") == {"length": "tokens"}
    assert whole_names(rules, "vocab") == {}
    assert whole_names(LayoutRules.from_text("length:rows;heads:model"), "heads") == {}
    assert split_names({"length": "tokens"}) == {"tokens": "length"}
    assert whole_dims("batch;length;embed", {"length": "tokens"}) == "batch;tokens;embed"


def test_attention_needs_whole_sequences_of_its_heads():
    with pytest.raises(LayoutError, match=r"'length:model' splits dim 'length'.*add 'heads:model'"):
        meta("length:model;d_ff:model", 2)


@pytest.mark.parametrize(
    ("run", "mesh", "options"),
    [
        pytest.param(run_tf2, "layers:2;data:2;model:2", {"remat": "full"}, marks=pytest.mark.slow),
        (run_tf1, "layers:2;model:2", {"remat": "none"}),
    ],
)
def test_slices_of_tokens_go_from_stage_to_stage(run, mesh, options):
    def stack(cls, **changes):
        blocks = [block(dropout_rate=0.3).Set(name=f"named_{i}") for i in range(2)]
        cells = [FeatureExtractionLayer.Params().Set(name=f"s{b.name}", sub=[b]) for b in blocks]
        return cls.Params().Set(name="stack", cell_tpl=cells, **changes)

    wanted = run(stack(SeqLayer), [X])
    params = stack(PipeliningLayer, num_micro_batches=2, **options)
    found = run(params, [X], num_devices=f"{mesh} {SPLIT}")
    np.testing.assert_allclose(found.outputs[0], wanted.outputs[0], rtol=1e-4, atol=1e-5)
    found.assert_close(wanted, rtol=2e-4, atol=2e-5)
