"""Llama (Touvron et al., 2023), and the parts that later families share with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..values import Given, WeightsError
from .family import SILU_GATE, Config, Family, equal_heads, notes, rotations, tokens

_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
MODULES: Mapping[str, str] = {
    "attention_norm": "input_layernorm",
    "attention/q": "self_attn.q_proj",
    "attention/k": "self_attn.k_proj",
    "attention/v": "self_attn.v_proj",
    "attention/out": "self_attn.o_proj",
    "feed_forward_norm": "post_attention_layernorm",
    "feed_forward/gate": "mlp.gate_proj",
    "feed_forward/in": "mlp.up_proj",
    "feed_forward/out": "mlp.down_proj",
}


def sizes(
    given: Given,
    *,
    tied: bool = False,
    rope_theta: float = 1e4,
    rotated_part: float | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Reads the fields that families like Llama share; `others` are different defaults.

    Keyword arguments have the names of the keys, but for `tied` and `rotated_part`.
    """
    defaults = {**_DEFAULTS, **others}
    model_dim = given.whole("hidden_size", defaults["hidden_size"])
    num_heads = given.whole("num_attention_heads", defaults["num_attention_heads"])
    default = defaults.get("num_key_value_heads", num_heads)
    # In `transformers` null is as many as there are heads, and a missing key the default.
    num_kv_heads = given.optional("num_key_value_heads", default, given.whole) or num_heads
    if num_heads % num_kv_heads:
        raise WeightsError(
            f"{given.path}: num_key_value_heads is {num_kv_heads}, which does not divide "
            f"num_attention_heads {num_heads}"
        )
    if given.get("head_dim") is None and "head_dim" not in defaults:
        named = "hidden_size", model_dim, "num_attention_heads", num_heads
        head_dim = equal_heads(given, *named)
    else:
        head_dim = given.whole("head_dim", defaults.get("head_dim"))
    vocab_size = given.whole("vocab_size", defaults["vocab_size"])
    return {
        "vocab_size": vocab_size,
        "num_layers": given.whole("num_hidden_layers", defaults["num_hidden_layers"]),
        "model_dim": model_dim,
        "hidden_dim": given.whole("intermediate_size", defaults["intermediate_size"]),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_length": given.whole("max_position_embeddings", defaults["max_position_embeddings"]),
        "norm": "rms",
        "epsilon": given.number("rms_norm_eps", defaults["rms_norm_eps"]),
        "tied": given.flag("tie_word_embeddings", tied),
        **rotations(given, head_dim, base=rope_theta, part=rotated_part),
        **tokens(given, vocab_size),
        "notes": notes(given, "attention_dropout", 0.0),
    }


def silu_gate(given: Given) -> str:
    """Returns the activation, SwiGLU."""
    return given.choice("hidden_act", "silu", SILU_GATE)


def like_llama(**changes: Any) -> Family:
    """Returns a family whose names are those of Llama, up to some."""
    same = {"prefix": "model.", "blocks": "layers.{}.", "table": "embed_tokens", "norm": "norm"}
    return Family(**{**same, "modules": MODULES, **changes})


def _read(given: Given) -> Config:
    """Reads a model; defaults are those of the smallest one."""
    has_biases = given.flag("attention_bias", False)
    return Config(
        model_type="llama",
        **sizes(given),
        activation=silu_gate(given),
        attention_bias=has_biases,
        out_bias=has_biases,
        feed_forward_bias=given.flag("mlp_bias", False),
    )


# How matmuls were cut in training.
LLAMA = like_llama(read=_read, ignored=frozenset(["pretraining_tp"]))
