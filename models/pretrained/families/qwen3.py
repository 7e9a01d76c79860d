"""Qwen3 (Yang et al., 2025): Llama with norms of each head's queries and keys."""

from __future__ import annotations

from typing import Any

from ..values import Given
from .family import Config
from .llama import MODULES, like_llama, silu_gate, sizes
from .qwen2 import DEFAULTS, later_windows


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    shared: dict[str, Any] = sizes(given, **DEFAULTS, head_dim=128)
    has_biases = given.flag("attention_bias", False)
    return Config(
        model_type="qwen3",
        **shared,
        activation=silu_gate(given),
        head_norms=True,
        windows=later_windows(given, shared["num_layers"]),
        attention_bias=has_biases,
        out_bias=has_biases,
    )


QWEN3 = like_llama(
    read=_read,
    modules={
        **MODULES,
        "attention/q_norm": "self_attn.q_norm",
        "attention/k_norm": "self_attn.k_norm",
    },
)
