"""GPT-NeoX (Black et al., 2022) and Pythia: parallel halves, and heads that turn in part."""

from __future__ import annotations

from ..values import Given
from .family import ACTIVATIONS, Config, Family, equal_heads, notes, rate, rotations, tokens


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    model_dim = given.whole("hidden_size", 6144)
    num_heads = given.whole("num_attention_heads", 64)
    named = "hidden_size", model_dim, "num_attention_heads", num_heads
    head_dim = equal_heads(given, *named)
    vocab_size = given.whole("vocab_size", 50432)
    dropout = rate(given, "hidden_dropout", 0.0)
    has_biases = given.flag("attention_bias", True)
    return Config(
        model_type="gpt_neox",
        vocab_size=vocab_size,
        num_layers=given.whole("num_hidden_layers", 44),
        model_dim=model_dim,
        hidden_dim=given.whole("intermediate_size", 24576),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=head_dim,
        max_length=given.whole("max_position_embeddings", 2048),
        norm="layer",
        epsilon=given.number("layer_norm_eps", 1e-5),
        activation=given.choice("hidden_act", "gelu", ACTIVATIONS),
        parallel=given.flag("use_parallel_residual", True),
        **rotations(
            given, head_dim, base_name="rotary_emb_base", part_name="rotary_pct", part=0.25
        ),
        attention_bias=has_biases,
        out_bias=has_biases,
        feed_forward_bias=True,
        tied=given.flag("tie_word_embeddings", False),
        embedding_dropout=dropout,
        residual_dropout=dropout,
        **tokens(given, vocab_size),
        notes=notes(given, "attention_dropout", 0.0),
    )


GPT_NEOX = Family(
    read=_read,
    prefix="gpt_neox.",
    blocks="layers.{}.",
    table="embed_in",
    norm="final_layer_norm",
    head="embed_out",
    modules={
        "attention_norm": "input_layernorm",
        "attention/q": "attention.query_key_value",
        "attention/k": "attention.query_key_value",
        "attention/v": "attention.query_key_value",
        "attention/out": "attention.dense",
        "feed_forward_norm": "post_attention_layernorm",
        "feed_forward/in": "mlp.dense_h_to_4h",
        "feed_forward/out": "mlp.dense_4h_to_h",
    },
    by_head=True,
    # Of a head that classifies.
    ignored=frozenset(
        ["attention_probs_dropout_prob", "classifier_dropout", "hidden_dropout_prob"]
    ),
)
