"""Adapters of matmuls: what they compute, and what they refuse."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import FeedForward, lowering_scope
from pipemesh.layers.named.lora import LowRank
from pipemesh.lowering import PlacementLowering, ops
from pipemesh.mesh import LayoutRules, Mesh

ADAPTER = LowRank.Params().Set(rank=2, alpha=6.0)


def made(rules="", **changes):
    params = FeedForward.Params().Set(name="ff", input_dim=4, hidden_dim=8, adapter_tpl=ADAPTER)
    lowering = PlacementLowering(
        Mesh.from_text("model:2"), LayoutRules.from_text(rules), ["CPU:0"] * 2
    )
    with lowering_scope(lowering), py_utils.VariableStore():
        return params.Set(**changes).Instantiate(), lowering


def test_an_adapter_adds_to_the_product(eagerly):
    layer, lowering = made("d_ff:model", adapted=("w_out",), use_bias=False)
    adapter = layer.children["w_out_lora"]
    assert {tuple(v.shape) for v in adapter.vars.Flatten()} == {(4, 2), (2, 4)}
    first = np.concatenate([v for v in adapter.vars.Flatten() if v.shape[0] == 4])
    assert np.abs(first).max() <= 8**-0.5 and np.unique(first).size == 16
    x = np.random.default_rng(0).normal(size=[2, 3, 4]).astype(np.float32)

    def result():
        with lowering_scope(lowering):
            return ops.export_tensor(layer.FPropDefaultTheta(tf.constant(x))).numpy()

    before = result()
    second = np.arange(8, dtype=np.float32).reshape(2, 4)
    adapter.vars.b.assign(second)
    w_in = np.concatenate([layer.vars[f"w_in_slice_{i}"] for i in (0, 1)], 1)
    added = 3 * np.maximum(x @ w_in, 0) @ first @ second
    np.testing.assert_allclose(result(), before + added, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("error", "message", "changes"),
    [
        (LayoutError, "the rule 'rank:model' splits the narrow dim of ad", {"rules": "rank:model"}),
        (
            PipelineError,
            "no adapter of weight 'w_gat'; did you mean 'w_out'",
            {"adapted": ("w_gat",)},
        ),
        (PipelineError, "rank", {"adapter_tpl": ADAPTER.Copy().Set(rank=0)}),
    ],
)
def test_wrong_adapters(eagerly, error, message, changes):
    with pytest.raises(error, match=message):
        made(**{"adapted": ("w_in",), **changes})
