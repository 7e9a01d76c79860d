"""Phi-3 (Abdin et al., 2024): Llama with its matmuls in fewer tensors."""

from __future__ import annotations

from typing import Any

from ..values import Given
from .family import Config, rate
from .llama import MODULES, like_llama, silu_gate, sizes
from .mistral import all_windows


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    given.only("attention_bias", [False, None], "attention has no biases")
    shared: dict[str, Any] = sizes(
        given,
        vocab_size=32064,
        hidden_size=3072,
        intermediate_size=8192,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        rotated_part=1.0,
    )
    return Config(
        model_type="phi3",
        **shared,
        activation=silu_gate(given),
        windows=all_windows(given, shared["num_layers"], None),
        residual_dropout=rate(given, "resid_pdrop", 0.0),
    )


PHI3 = like_llama(
    read=_read,
    modules={
        **MODULES,
        "attention/q": "self_attn.qkv_proj",
        "attention/k": "self_attn.qkv_proj",
        "attention/v": "self_attn.qkv_proj",
        "feed_forward/gate": "mlp.gate_up_proj",
        "feed_forward/in": "mlp.gate_up_proj",
    },
    # A length for rotations that are refused, code for old versions of `transformers`, which itself
    # prefers its own, and dropout that it does not apply.
    ignored=frozenset(["original_max_position_embeddings", "auto_map", "embd_pdrop"]),
)
