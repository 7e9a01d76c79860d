"""GPT-2 (Radford et al., 2019)."""

from __future__ import annotations

from ..values import Given
from .family import ACTIVATIONS, Config, Family, equal_heads, notes, rate, tokens


def _read(given: Given) -> Config:
    """Reads a model; defaults are those of the smallest one."""
    why = "attention divides by the root of a head's size"
    given.only("scale_attn_weights", [True], why)
    given.only("scale_attn_by_inverse_layer_idx", [False, None], why)
    model_dim, num_heads = given.whole("n_embd", 768), given.whole("n_head", 12)
    vocab_size = given.whole("vocab_size", 50257)
    return Config(
        model_type="gpt2",
        vocab_size=vocab_size,
        num_layers=given.whole("n_layer", 12),
        model_dim=model_dim,
        hidden_dim=given.optional("n_inner", None, given.whole) or 4 * model_dim,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=equal_heads(given, "n_embd", model_dim, "n_head", num_heads),
        max_length=given.whole("n_positions", 1024),
        norm="layer",
        epsilon=given.number("layer_norm_epsilon", 1e-5),
        activation=given.choice("activation_function", "gelu_new", ACTIVATIONS),
        attention_bias=True,
        out_bias=True,
        feed_forward_bias=True,
        tied=given.flag("tie_word_embeddings", True),
        embedding_dropout=rate(given, "embd_pdrop", 0.1),
        residual_dropout=rate(given, "resid_pdrop", 0.1),
        **tokens(given, vocab_size),
        notes=notes(given, "attn_pdrop", 0.1),
    )


GPT2 = Family(
    read=_read,
    prefix="transformer.",
    blocks="h.{}.",
    table="wte",
    positions="wpe",
    norm="ln_f",
    modules={
        "attention_norm": "ln_1",
        "attention/q": "attn.c_attn",
        "attention/k": "attn.c_attn",
        "attention/v": "attn.c_attn",
        "attention/out": "attn.c_proj",
        "feed_forward_norm": "ln_2",
        "feed_forward/in": "mlp.c_fc",
        "feed_forward/out": "mlp.c_proj",
    },
    transposed=False,
    # Precision of scores, and heads that classify.
    ignored=frozenset(
        """
        n_ctx reorder_and_upcast_attn summary_activation summary_first_dropout
        summary_proj_to_labels summary_type summary_use_proj
        """.split()
    ),
)
