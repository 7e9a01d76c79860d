"""Gemma (Gemma Team, 2024): Llama with a GELU gate, scaled vectors, and norms about one."""

from __future__ import annotations

from typing import Any

from ..values import Given
from .family import Config
from .llama import like_llama, sizes

GATE = {"gelu_pytorch_tanh": "GEGLU_APPROXIMATE", "gelu_new": "GEGLU_APPROXIMATE"}


def shared_with_gemma2(given: Given, **defaults: Any) -> dict[str, Any]:
    """Returns the fields of both generations."""
    why = "a token sees only those before it"
    given.only("use_bidirectional_attention", [None, False], why)
    has_biases = given.flag("attention_bias", False)
    return {
        **sizes(given, vocab_size=256000, head_dim=256, tied=True, **defaults),
        "norms_above_one": True,
        "scaled_embedding": True,
        "attention_bias": has_biases,
        "out_bias": has_biases,
    }


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    # The first files say "gelu", and mean the approximation.
    legacy = {**GATE, "gelu": "GEGLU_APPROXIMATE"}
    given.only("hidden_activation", [None, *GATE], "the gate is a GELU by tanh")
    return Config(
        model_type="gemma",
        **shared_with_gemma2(
            given,
            hidden_size=3072,
            intermediate_size=24576,
            num_hidden_layers=28,
            num_attention_heads=16,
            num_key_value_heads=16,
            max_position_embeddings=8192,
        ),
        activation=given.choice("hidden_act", "gelu_pytorch_tanh", legacy),
    )


GEMMA = like_llama(read=_read)
