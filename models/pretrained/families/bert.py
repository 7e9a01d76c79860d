"""BERT (Devlin et al., 2019): an encoder that predicts masked tokens."""

from __future__ import annotations

from ..values import Given
from .family import ACTIVATIONS, Config, Family, equal_heads, notes, rate, tokens


def _read(given: Given) -> Config:
    """Reads a model; defaults are those of `transformers`."""
    given.only("is_decoder", [False, None], "a token sees both sides")
    given.only("position_embedding_type", ["absolute", None], "each position has a vector")
    given.only("tie_word_embeddings", [True], "logits use the table of the embedding")
    model_dim = given.whole("hidden_size", 768)
    num_heads = given.whole("num_attention_heads", 12)
    vocab_size, dropout = given.whole("vocab_size", 30522), rate(given, "hidden_dropout_prob", 0.1)
    named = "hidden_size", model_dim, "num_attention_heads", num_heads
    return Config(
        model_type="bert",
        kind="encoder",
        vocab_size=vocab_size,
        num_layers=given.whole("num_hidden_layers", 12),
        model_dim=model_dim,
        hidden_dim=given.whole("intermediate_size", 3072),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=equal_heads(given, *named),
        max_length=given.whole("max_position_embeddings", 512),
        token_types=given.whole("type_vocab_size", 2),
        norm="layer",
        epsilon=given.number("layer_norm_eps", 1e-12),
        activation=given.choice("hidden_act", "gelu", ACTIVATIONS),
        attention_bias=True,
        out_bias=True,
        feed_forward_bias=True,
        tied=True,
        embedding_dropout=dropout,
        residual_dropout=dropout,
        **tokens(given, vocab_size),
        notes=notes(given, "attention_probs_dropout_prob", 0.1),
    )


BERT = Family(
    read=_read,
    prefix="",
    blocks="bert.encoder.layer.{}.",
    table="bert.embeddings.word_embeddings",
    positions="bert.embeddings.position_embeddings",
    types="bert.embeddings.token_type_embeddings",
    embedding_norm="bert.embeddings.LayerNorm",
    transform="cls.predictions.transform.dense",
    norm="cls.predictions.transform.LayerNorm",
    head="cls.predictions.decoder",
    modules={
        "attention/q": "attention.self.query",
        "attention/k": "attention.self.key",
        "attention/v": "attention.self.value",
        "attention/out": "attention.output.dense",
        "attention_norm": "attention.output.LayerNorm",
        "feed_forward/in": "intermediate.dense",
        "feed_forward/out": "output.dense",
        "feed_forward_norm": "output.LayerNorm",
    },
    # Heads of other objectives.
    unused=("bert.pooler.", "cls.seq_relationship."),
    older={"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"},
    # Dropout and sizes of heads that classify.
    ignored=frozenset(
        """
        classifier_dropout directionality pooler_fc_size pooler_num_attention_heads
        pooler_num_fc_layers pooler_size_per_head pooler_type
        """.split()
    ),
)
