"""Gemma 2 (Gemma Team, 2024): capped scores and logits, alternating windows, four norms."""

from __future__ import annotations

from typing import Any

from ..values import Given
from .family import Config, windows
from .gemma import GATE, shared_with_gemma2
from .llama import MODULES, like_llama


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    shared: dict[str, Any] = shared_with_gemma2(
        given,
        hidden_size=2304,
        intermediate_size=9216,
        num_hidden_layers=26,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=8192,
    )
    window = given.whole("sliding_window", 4096)
    given.only("sliding_window_size", [window, None], "it is another name of sliding_window")
    return Config(
        model_type="gemma2",
        **shared,
        activation=given.choice("hidden_activation", "gelu_pytorch_tanh", GATE),
        output_norms=True,
        score_scale=given.number("query_pre_attn_scalar", 256) ** -0.5,
        score_cap=given.optional("attn_logit_softcapping", 50.0, given.number),
        logit_cap=given.optional("final_logit_softcapping", 30.0, given.number),
        windows=windows(given, window, [i % 2 == 0 for i in range(shared["num_layers"])]),
    )


GEMMA2 = like_llama(
    read=_read,
    modules={
        **MODULES,
        "attention_output_norm": "post_attention_layernorm",
        "feed_forward_norm": "pre_feedforward_layernorm",
        "feed_forward_output_norm": "post_feedforward_layernorm",
    },
    # The name of an activation that is not used, and the form of the cache.
    ignored=frozenset(["hidden_act", "cache_implementation"]),
)
