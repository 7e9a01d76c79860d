"""T5 (Raffel et al., 2020): an encoder-decoder whose blocks share biases by distance."""

from __future__ import annotations

from ..values import Given
from .family import Config, Family, notes, rate, tokens

# Version 1.0 has `relu`, 1.1 `gated-gelu`, which is the tanh approximation.
_ACTIVATIONS = {
    "gated-gelu": "GEGLU_APPROXIMATE",
    "gated-gelu_new": "GEGLU_APPROXIMATE",
    "gated-silu": "SWIGLU",
    "gelu": "GELU",
    "gelu_new": "GELU_APPROXIMATE",
    "relu": "RELU",
}


def _read(given: Given) -> Config:
    """Reads a model; missing keys have the defaults of `transformers`."""
    given.only("is_decoder", [False, None], "the encoder sees both sides")
    given.only("tie_encoder_decoder", [False, None], "both sides have weights of their own")
    projection = given.get("feed_forward_proj") or "relu"
    activation = given.choice("feed_forward_proj", "relu", _ACTIVATIONS)
    gate, _, function = str(projection).rpartition("-")
    function = "gelu_new" if projection == "gated-gelu" else function
    for name, value in (("is_gated_act", bool(gate)), ("dense_act_fn", function)):
        given.only(name, [value, None], f"feed_forward_proj is {projection!r}")
    # Newer files note apart that 1.1 does not scale, and call all models tied.
    is_tied = given.flag("tie_word_embeddings", True)
    is_scaled = given.flag("scale_decoder_outputs", is_tied)
    model_dim, num_heads = given.whole("d_model", 512), given.whole("num_heads", 8)
    vocab_size, num_layers = given.whole("vocab_size", 32128), given.whole("num_layers", 6)
    dropout = rate(given, "dropout_rate", 0.1)
    starts = given.tokens("decoder_start_token_id", vocab_size)
    starts = starts or given.tokens("pad_token_id", vocab_size) or (0,)
    found = tokens(given, vocab_size)
    if "eos_token_id" not in given.values:
        found["eos"] = (1,)
    if dropout:
        given.notes.append("in training nothing is dropped behind the last norms of both sides")
    return Config(
        model_type="t5",
        kind="encoder_decoder",
        vocab_size=vocab_size,
        num_layers=num_layers,
        num_decoder_layers=given.optional("num_decoder_layers", None, given.whole) or num_layers,
        model_dim=model_dim,
        hidden_dim=given.whole("d_ff", 2048),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=given.whole("d_kv", 64),
        # Distances have no end.
        max_length=1 << 20,
        relative_buckets=given.whole("relative_attention_num_buckets", 32),
        relative_max_distance=given.whole("relative_attention_max_distance", 128),
        norm="rms",
        epsilon=given.number("layer_norm_epsilon", 1e-6),
        activation=activation,
        score_scale=1.0,
        logit_scale=model_dim**-0.5 if is_scaled else 1.0,
        tied=is_tied and is_scaled,
        embedding_dropout=dropout,
        residual_dropout=dropout,
        start=starts[0],
        **found,
        notes=notes(given, "dropout_rate", 0.1),
    )


def _modules(number: int, kinds: dict[str, str]) -> dict[str, str]:
    """Returns the modules of a block: attentions by their names here, then a feed-forward layer,
    whose number in the block is `number`.
    """
    found = {"attention/relative_bias": "layer.0.SelfAttention.relative_attention_bias"}
    for place, (ours, theirs) in enumerate(kinds.items()):
        found[f"{ours}_norm"] = f"layer.{place}.layer_norm"
        for name in ("q", "k", "v", "out"):
            found[f"{ours}/{name}"] = f"layer.{place}.{theirs}.{name[0]}"
    last = f"layer.{number}.DenseReluDense"
    return found | {
        "feed_forward_norm": f"layer.{number}.layer_norm",
        "feed_forward/in": f"{last}.wi_1",
        "feed_forward/gate": f"{last}.wi_0",
        "feed_forward/out": f"{last}.wo",
    }


T5 = Family(
    read=_read,
    prefix="",
    blocks="encoder.block.{}.",
    decoder_blocks="decoder.block.{}.",
    table="shared",
    memory_norm="encoder.final_layer_norm",
    norm="decoder.final_layer_norm",
    modules=_modules(1, {"attention": "SelfAttention"}),
    decoder_modules=_modules(
        2, {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}
    ),
    ungated=("wi_1", "wi"),
    copies=("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"),
    # It changes no score, as all keys of a query have it.
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.",),
    # Initial weights, heads that classify, and the length of the first training.
    ignored=frozenset(["classifier_dropout", "initializer_factor", "n_positions"]),
)
