"""Tiny models of the package `transformers`, and the same ones built of named layers."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
from lingvo.core import hyperparams

from pipemesh.layers.named import (
    Attention,
    Embedding,
    Experts,
    NamedLayer,
    Norm,
    SoftmaxCrossEntropy,
    TransformerBlock,
)

VOCAB, EMBED, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, EXPERTS, BLOCKS = 24, 16, 4, 2, 4, 12, 4, 2
# Far from what they are by default on either side, so that one that is not heeded shows.
EPSILON, ROTARY_BASE = 0.02, 50.0


class ExpertBlock(NamedLayer):
    """A block of which the second half is experts."""

    @classmethod
    def Params(cls):
        p = super().Params()
        for part in ("norm", "attention", "experts"):
            p.Define(f"{part}_tpl", None, "Of the part.")
        return p

    def __init__(self, params):
        super().__init__(params)
        p = self.params
        self.CreateChild("attention_norm", p.norm_tpl)
        self.CreateChild("attention", p.attention_tpl)
        self.CreateChild("experts_norm", p.norm_tpl)
        self.CreateChild("experts", p.experts_tpl)

    def FProp(self, theta, x, segment_ids, segment_pos, paddings):
        y = self.attention_norm.FProp(theta.attention_norm, x)
        x = x + self.attention.FProp(theta.attention, y, segment_ids, segment_pos, paddings)
        y = self.experts_norm.FProp(theta.experts_norm, x)
        return x + self.experts.FProp(theta.experts, y, paddings)[0]


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

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos, paddings):
        x = self.embedding.FProp(theta.embedding, ids, segment_pos)
        for block, own in zip(self.blocks, theta.blocks, strict=True):
            x = block.FProp(own, x, segment_ids, segment_pos, paddings)
        x = self.norm.FProp(theta.norm, x)
        total, number, _ = self.softmax.FProp(theta.softmax, x, labels, weights)
        return self.softmax.Logits(theta.softmax, x), total / number


@dataclasses.dataclass(frozen=True)
class Peer:
    """A model twice.

    Attributes:
        make: theirs, of the package.
        params: ours.
        names: for each of our weights the name of theirs, and what has to be done with it.
        layout: a mesh, and rules that split as much of ours as can be.
    """

    make: Callable[[Any], Any]
    params: hyperparams.Params
    names: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]]
    layout: tuple[str, str]


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


def third(number, *sizes):
    """One of queries, keys and values, which GPT-2 makes in one product; it has no transpose."""
    return lambda w: np.split(w, 3, axis=-1)[number].reshape(*sizes, HEADS, HEAD_DIM)


def names_of(outside, inside, block):
    """Names of the weights outside of blocks, and of those of each block."""
    return outside | {
        f"blocks[{i}].{ours}": (f"{block}.{i}.{theirs}", change)
        for i in range(BLOCKS)
        for ours, (theirs, change) in inside.items()
    }


GPT2_OUTSIDE = {
    "embedding.table": ("transformer.wte.weight", same),
    "embedding.positions": ("transformer.wpe.weight", same),
    "norm.scale": ("transformer.ln_f.weight", same),
    "norm.bias": ("transformer.ln_f.bias", same),
    # Theirs is one weight.
    "softmax.w": ("transformer.wte.weight", swapped),
}
GPT2_INSIDE = {
    "attention_norm.scale": ("ln_1.weight", same),
    "attention_norm.bias": ("ln_1.bias", same),
    **{f"attention.w_{c}": ("attn.c_attn.weight", third(i, EMBED)) for i, c in enumerate("qkv")},
    **{f"attention.b_{c}": ("attn.c_attn.bias", third(i)) for i, c in enumerate("qkv")},
    "attention.w_out": ("attn.c_proj.weight", lambda w: w.reshape(HEADS, HEAD_DIM, EMBED)),
    "attention.b_out": ("attn.c_proj.bias", same),
    "feed_forward_norm.scale": ("ln_2.weight", same),
    "feed_forward_norm.bias": ("ln_2.bias", same),
    "feed_forward.w_in": ("mlp.c_fc.weight", same),
    "feed_forward.b_in": ("mlp.c_fc.bias", same),
    "feed_forward.w_out": ("mlp.c_proj.weight", same),
    "feed_forward.b_out": ("mlp.c_proj.bias", same),
}
LLAMA_OUTSIDE = {
    "embedding.table": ("model.embed_tokens.weight", same),
    "norm.scale": ("model.norm.weight", same),
    "softmax.w": ("lm_head.weight", swapped),
}
LLAMA_ATTENTION = {
    "attention_norm.scale": ("input_layernorm.weight", same),
    "attention.w_q": ("self_attn.q_proj.weight", from_heads(HEADS)),
    "attention.w_k": ("self_attn.k_proj.weight", from_heads(KV_HEADS)),
    "attention.w_v": ("self_attn.v_proj.weight", from_heads(KV_HEADS)),
    "attention.w_out": ("self_attn.o_proj.weight", to_embed),
}
LLAMA_FEED_FORWARD = {
    "feed_forward_norm.scale": ("post_attention_layernorm.weight", same),
    "feed_forward.w_in": ("mlp.up_proj.weight", swapped),
    "feed_forward.w_gate": ("mlp.gate_proj.weight", swapped),
    "feed_forward.w_out": ("mlp.down_proj.weight", swapped),
}
MIXTRAL_EXPERTS = {
    "experts_norm.scale": ("post_attention_layernorm.weight", same),
    "experts.w_router": ("mlp.gate.weight", swapped),
    # Gates come first.
    "experts.w_in": ("mlp.experts.gate_up_proj", lambda w: swapped(w[:, HIDDEN:])),
    "experts.w_gate": ("mlp.experts.gate_up_proj", lambda w: swapped(w[:, :HIDDEN])),
    "experts.w_out": ("mlp.experts.down_proj", swapped),
}


def gpt2():
    """Radford et al., 2019: learned positions, layer norm, GELU by tanh, biases, tied vectors."""
    norm = Norm.Params().Set(input_dim=EMBED, epsilon=EPSILON)
    block = TransformerBlock.Params().Set(
        input_dim=EMBED, num_heads=HEADS, hidden_dim=HIDDEN, norm_tpl=norm
    )
    block.feed_forward_tpl.activation = "GELU_APPROXIMATE"
    embedding = Embedding.Params().Set(
        vocab_size=VOCAB, embedding_dim=EMBED, positions="learned", max_length=16
    )
    return Peer(
        lambda package: package.GPT2LMHeadModel(
            package.GPT2Config(
                vocab_size=VOCAB,
                n_positions=16,
                n_embd=EMBED,
                n_layer=BLOCKS,
                n_head=HEADS,
                n_inner=HIDDEN,
                layer_norm_epsilon=EPSILON,
                bos_token_id=0,
                eos_token_id=0,
            )
        ),
        LanguageModel.Params().Set(embedding=embedding, block=block, norm=norm),
        names_of(GPT2_OUTSIDE, GPT2_INSIDE, "transformer.h"),
        ("model:2", "heads:model;d_ff:model;vocab:model"),
    )


def llama():
    """Touvron et al., 2023: rotary positions, RMS norm, SwiGLU, shared keys, no bias."""
    block = TransformerBlock.Params().Set(
        input_dim=EMBED,
        num_heads=HEADS,
        hidden_dim=HIDDEN,
        norm_tpl=_rms_norm(),
        attention_tpl=_rotary_attention(),
    )
    block.feed_forward_tpl.Set(activation="SWIGLU", use_bias=False)
    return Peer(
        lambda package: package.LlamaForCausalLM(package.LlamaConfig(**_config())),
        _llama_like(block),
        names_of(LLAMA_OUTSIDE, LLAMA_ATTENTION | LLAMA_FEED_FORWARD, "model.layers"),
        ("model:2", "heads:model;kv_heads:model;d_ff:model;vocab:model"),
    )


def mixtral():
    """Jiang et al., 2024: Llama with two of several experts for each token, which drop none."""
    experts = Experts.Params().Set(
        input_dim=EMBED,
        hidden_dim=HIDDEN,
        num_experts=EXPERTS,
        num_choices=2,
        capacity_factor=None,
        activation="SWIGLU",
    )
    block = ExpertBlock.Params().Set(
        norm_tpl=_rms_norm(), attention_tpl=_rotary_attention(), experts_tpl=experts
    )
    return Peer(
        lambda package: package.MixtralForCausalLM(
            package.MixtralConfig(
                **_config(), num_local_experts=EXPERTS, num_experts_per_tok=2, sliding_window=None
            )
        ),
        _llama_like(block),
        names_of(LLAMA_OUTSIDE, LLAMA_ATTENTION | MIXTRAL_EXPERTS, "model.layers"),
        (
            "data:2;model:2",
            "batch:data;experts:data;heads:model;kv_heads:model;expert_ff:model;vocab:model",
        ),
    )


def _config():
    return {
        "vocab_size": VOCAB,
        "hidden_size": EMBED,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
    }


def _rms_norm():
    return Norm.Params().Set(input_dim=EMBED, kind="rms", epsilon=EPSILON)


def _rotary_attention():
    # Blocks of 4 and 5 queries, so that there are several.
    return Attention.Params().Set(
        input_dim=EMBED,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        use_bias=False,
        use_rotary=True,
        rotary_base=ROTARY_BASE,
        block_size=5,
    )


def _llama_like(block):
    embedding = Embedding.Params().Set(vocab_size=VOCAB, embedding_dim=EMBED)
    return LanguageModel.Params().Set(embedding=embedding, block=block, norm=_rms_norm())
