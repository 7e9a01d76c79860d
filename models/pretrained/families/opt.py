"""OPT (Zhang et al., 2022): GPT-2 with ReLU, whose positions begin at the third row."""

from __future__ import annotations

from ..values import Given
from .family import ACTIVATIONS, Config, Family, equal_heads, notes, rate, tokens


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    given.only("do_layer_norm_before", [True], "norms come before the halves of a block")
    given.only("_remove_final_layer_norm", [False, None], "a norm comes before the logits")
    given.only("layer_norm_elementwise_affine", [True], "norms have weights")
    given.only("layerdrop", [0.0, 0, None], "no block is skipped in training")
    model_dim = given.whole("hidden_size", 768)
    given.only("word_embed_proj_dim", [model_dim, None], "vectors are of one size, hidden_size")
    num_heads = given.whole("num_attention_heads", 12)
    vocab_size = given.whole("vocab_size", 50272)
    has_biases = given.flag("enable_bias", True)
    named = "hidden_size", model_dim, "num_attention_heads", num_heads
    return Config(
        model_type="opt",
        vocab_size=vocab_size,
        num_layers=given.whole("num_hidden_layers", 12),
        model_dim=model_dim,
        hidden_dim=given.whole("ffn_dim", 3072),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=equal_heads(given, *named),
        max_length=given.whole("max_position_embeddings", 2048),
        unused_positions=2,
        norm="layer",
        # That of torch; no file has another.
        epsilon=1e-5,
        activation=given.choice("activation_function", "relu", ACTIVATIONS),
        attention_bias=has_biases,
        out_bias=has_biases,
        feed_forward_bias=has_biases,
        tied=given.flag("tie_word_embeddings", True),
        residual_dropout=rate(given, "dropout", 0.1),
        **tokens(given, vocab_size),
        notes=notes(given, "attention_dropout", 0.0),
    )


OPT = Family(
    read=_read,
    prefix="model.",
    blocks="decoder.layers.{}.",
    table="decoder.embed_tokens",
    positions="decoder.embed_positions",
    norm="decoder.final_layer_norm",
    modules={
        "attention_norm": "self_attn_layer_norm",
        "attention/q": "self_attn.q_proj",
        "attention/k": "self_attn.k_proj",
        "attention/v": "self_attn.v_proj",
        "attention/out": "self_attn.out_proj",
        "feed_forward_norm": "final_layer_norm",
        "feed_forward/in": "fc1",
        "feed_forward/out": "fc2",
    },
    # The deviation of initial weights, and dropout that no model of `transformers` applies.
    ignored=frozenset(["init_std", "activation_dropout"]),
)
