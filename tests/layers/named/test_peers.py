"""Mixtral, built of named layers, has the logits and gradients of that of `transformers`.

GPT-2 and Llama are compared in tests/models/pretrained.
"""

import types

import numpy as np
import pytest

from pipemesh.layers.named import (
    Embedding,
    Experts,
    NamedLayer,
    Norm,
    SoftmaxCrossEntropy,
    TransformerBlock,
)
from tests.layers.named.harness import run

pytestmark = pytest.mark.slow

BATCH, LENGTH = 2, 9
VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, EXPERTS, BLOCKS = 24, 16, 4, 2, 4, 12, 4, 2
# Far from what they are by default on either side, so that one that is not heeded shows.
EPSILON, ROTARY_BASE = 0.02, 50.0
IDS = np.random.default_rng(5).integers(0, VOCAB, [BATCH, LENGTH]).astype(np.int32)
# Labels that do not count have this number.
IGNORED = -100
LAYOUT = "batch:data;experts:data;heads:model;kv_heads:model;expert_ff:model;vocab:model"


class LanguageModel(NamedLayer):
    """Logits, and the mean cross entropy of the labels that count."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("embedding", None, "Of tokens.")
        p.Define("block", None, "Each of the blocks.")
        p.Define("norm", None, "Of what the last block says.")
        softmax = SoftmaxCrossEntropy.Params().Set(
            input_dim=EMBED, vocab_size=VOCAB, use_bias=False
        )
        p.Define("softmax", softmax, "Of the labels.")
        return p.Set(name="model")

    def __init__(self, params):
        super().__init__(params)
        p = self.params
        self.CreateChild("embedding", p.embedding)
        self.CreateChildren("blocks", [p.block.Copy() for _ in range(BLOCKS)])
        self.CreateChild("norm", p.norm)
        self.CreateChild("softmax", p.softmax)

    def FProp(self, theta, ids, labels, weights, paddings):
        x = self.embedding.FProp(theta.embedding, ids)
        for block, own in zip(self.blocks, theta.blocks, strict=True):
            x, _ = block.FProp(own, x, paddings=paddings)
        x = self.norm.FProp(theta.norm, x)
        total, number, _ = self.softmax.FProp(theta.softmax, x, labels, weights)
        return self.softmax.Logits(theta.softmax, x), total / number


def same(w):
    return w


def swapped(w):
    return w.swapaxes(-1, -2)


def from_heads(heads):
    """Of a product whose outputs are those of all heads, one after the other."""
    return lambda w: w.T.reshape(EMBED, heads, HEAD_DIM)


def to_embed(w):
    """Of a product whose inputs are those of all heads."""
    return w.T.reshape(HEADS, HEAD_DIM, EMBED)


def names_of_theirs():
    """For each of our weights the name of theirs, and what has to be done with it."""
    outside = {
        "embedding.table": ("model.embed_tokens.weight", same),
        "norm.scale": ("model.norm.weight", same),
        "softmax.w": ("lm_head.weight", swapped),
    }
    inside = {
        "attention_norm.scale": ("input_layernorm.weight", same),
        "attention.w_q": ("self_attn.q_proj.weight", from_heads(HEADS)),
        "attention.w_k": ("self_attn.k_proj.weight", from_heads(KV_HEADS)),
        "attention.w_v": ("self_attn.v_proj.weight", from_heads(KV_HEADS)),
        "attention.w_out": ("self_attn.o_proj.weight", to_embed),
        "feed_forward_norm.scale": ("post_attention_layernorm.weight", same),
        "feed_forward.w_router": ("mlp.gate.weight", swapped),
        # Gates come first.
        "feed_forward.w_in": ("mlp.experts.gate_up_proj", lambda w: swapped(w[:, HIDDEN:])),
        "feed_forward.w_gate": ("mlp.experts.gate_up_proj", lambda w: swapped(w[:, :HIDDEN])),
        "feed_forward.w_out": ("mlp.experts.down_proj", swapped),
    }
    return outside | {
        f"blocks[{i}].{ours}": (f"model.layers.{i}.{theirs}", change)
        for i in range(BLOCKS)
        for ours, (theirs, change) in inside.items()
    }


NAMES = names_of_theirs()


def theirs(package):
    """Jiang et al., 2024: Llama with two of several experts for each token, which drop none."""
    return package.MixtralForCausalLM(
        package.MixtralConfig(
            vocab_size=VOCAB,
            hidden_size=EMBED,
            intermediate_size=HIDDEN,
            num_hidden_layers=BLOCKS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            rms_norm_eps=EPSILON,
            rope_parameters={"rope_type": "default", "rope_theta": ROTARY_BASE},
            num_local_experts=EXPERTS,
            num_experts_per_tok=2,
            sliding_window=None,
        )
    )


def ours():
    norm = Norm.Params().Set(input_dim=EMBED, kind="rms", epsilon=EPSILON)
    experts = Experts.Params().Set(num_experts=EXPERTS, capacity_factor=None, activation="SWIGLU")
    block = TransformerBlock.Params().Set(
        input_dim=EMBED,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        norm_tpl=norm,
        feed_forward_tpl=experts,
    )
    # Blocks of 4 and 5 queries, so that there are several.
    block.attention_tpl.Set(
        num_kv_heads=KV_HEADS,
        use_bias=False,
        use_rotary=True,
        rotary_base=ROTARY_BASE,
        block_size=5,
    )
    embedding = Embedding.Params().Set(vocab_size=VOCAB, embedding_dim=EMBED)
    return LanguageModel.Params().Set(embedding=embedding, block=block, norm=norm)


def whole_rows():
    """Every row is one text: nothing else is said of it."""
    return types.SimpleNamespace(theirs={}, labels=IDS, paddings=None, real=np.ones_like(IDS))


def padded_rows():
    """Rows begin with padding, which the tokens after it may not see."""
    paddings = np.zeros([BATCH, LENGTH], np.float32)
    paddings[0, :3] = paddings[1, :1] = 1
    real = 1 - paddings
    labels = np.where(paddings > 0, IGNORED, IDS)
    # The first token has none before it.
    labels[0, 3] = labels[1, 1] = IGNORED
    return types.SimpleNamespace(
        theirs={"attention_mask": real.astype(np.int64)},
        labels=labels,
        paddings=paddings,
        real=real,
    )


@pytest.fixture(scope="module", params=[whole_rows, padded_rows])
def case(request):
    """The model of `transformers`, its logits, its loss, and what we need to do the same."""
    reason = "the models to compare with are not installed: pip install -e '.[dev,peers]'"
    torch = pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("transformers", reason=reason)
    rows = request.param()
    torch.manual_seed(7)
    model = theirs(package).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for weight in model.parameters():
            # Away from zeros and ones, and large enough for logits that differ.
            weight.add_(0.3 * torch.randn(weight.shape))
    tensors = {name: torch.tensor(value) for name, value in rows.theirs.items()}
    labels = torch.tensor(rows.labels, dtype=torch.int64)
    found = model(torch.tensor(IDS.astype(np.int64)), labels=labels, use_cache=False, **tensors)
    found.loss.backward()
    weights = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    grads = {name: weight.grad.numpy() for name, weight in model.named_parameters()}
    assert {name for name, _ in NAMES.values()} == set(weights)
    return types.SimpleNamespace(
        rows=rows,
        logits=found.logits.detach().numpy(),
        loss=found.loss.item(),
        values=renamed(weights, 1),
        grads=renamed(grads, 0),
    )


def renamed(theirs, one):
    """Their weights, or gradients, by the names and in the order of ours."""
    return {
        # Of a norm's scale we keep what differs from one.
        path: np.ascontiguousarray(change(theirs[name])) - one * path.endswith("norm.scale")
        for path, (name, change) in NAMES.items()
    }


@pytest.mark.parametrize(("mesh", "rules"), [("model:1", ""), ("data:2;model:2", LAYOUT)])
def test_logits_loss_and_gradients_are_theirs(case, mesh, rules):
    rows = case.rows
    # Theirs predict the next token inside of the model; ours take what is to be predicted.
    labels = np.concatenate([rows.labels[:, 1:], np.full([BATCH, 1], IGNORED)], 1).astype(np.int32)
    counts = (labels != IGNORED).astype(np.float32)
    inputs = [IDS, np.maximum(labels, 0), counts, rows.paddings]
    found = run(ours(), inputs, mesh, rules, values=case.values, loss=lambda outputs: outputs[1])
    logits, loss = found.outputs
    real = rows.real > 0
    assert np.std(case.logits[real]) > 0.5
    np.testing.assert_allclose(logits[real], case.logits[real], rtol=0, atol=1e-4)
    np.testing.assert_allclose(loss, case.loss, rtol=0, atol=1e-4)
    assert found.grads.keys() == case.grads.keys()
    for path, wanted in case.grads.items():
        most = abs(wanted).max()
        assert most > 1e-3, path
        np.testing.assert_allclose(
            found.grads[path], wanted, rtol=0, atol=1e-4 * most, err_msg=path
        )
