"""The description of a family of models, and how families read their `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..values import Given, WeightsError

# Names of activations in `transformers`, and those of layers with named dims.
ACTIVATIONS = {
    "gelu": "GELU",
    "gelu_fast": "GELU_APPROXIMATE",
    "gelu_new": "GELU_APPROXIMATE",
    "gelu_pytorch_tanh": "GELU_APPROXIMATE",
    "relu": "RELU",
}
SILU_GATE = {"silu": "SWIGLU", "swish": "SWIGLU"}
_GATED = ("SWIGLU", "GEGLU_APPROXIMATE")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The sizes and options of a language model.

    Attributes:
        model_type: one of `FAMILIES`.
        vocab_size: number of tokens.
        num_layers: number of blocks.
        model_dim: size of a token's vector.
        hidden_dim: size of the feed-forward layers' hidden vectors.
        num_heads: heads of attention.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`.
        head_dim: size of a head.
        max_length: most tokens in a row.
        norm: kind of the norms, `layer` or `rms`.
        epsilon: epsilon of the norms.
        activation: activation of the feed-forward layers, by its name here.
        norms_above_one: whether a norm's weight is its factor minus 1.
        output_norms: whether outputs of both halves of a block are normalized.
        head_norms: whether queries and keys of each head are normalized.
        parallel: whether both halves of a block take its inputs.
        rotary_base: base of rotary positions; None for learned positions.
        rotary_scaling: params of a `RotaryScaling`; None for none.
        rotary_dim: number of elements of a head that are rotated; None for all.
        unused_positions: rows of learned positions before the first position's.
        windows: the number of tokens that a token sees, for each block; None for all.
        score_scale: factor of scores; None for 1 / sqrt(head_dim).
        score_cap: limit of scores; None for none.
        logit_cap: limit of logits; None for none.
        attention_bias: whether the matmuls of queries, keys and values have biases.
        out_bias: whether the last matmul of attention has a bias.
        feed_forward_bias: whether the matmuls of feed-forward layers have biases.
        num_experts: number of experts in a block; 0 for none.
        scaled_embedding: whether vectors of tokens are scaled by the root of their size.
        tied: whether the logits use the embedding's table.
        embedding_dropout: dropout rate after the embedding.
        residual_dropout: dropout rate of what is added to the residuals.
        kind: `decoder`, which predicts the next token; `encoder`, which sees both sides and
            predicts masked tokens; or `encoder_decoder`.
        num_decoder_layers: number of blocks of the decoder behind an encoder.
        token_types: number of types of tokens; 0 for none.
        relative_buckets: buckets of the bias by distance that all blocks of a side share; 0 for
            none.
        relative_max_distance: from this distance on, the last bucket is used.
        logit_scale: factor of the vectors that logits are computed from.
        start: the token that starts the target of an encoder-decoder.
        bos: the token that starts a text; None if there is none.
        eos: tokens that end a text.
        notes: lines about differences from `transformers`.
    """

    model_type: str
    vocab_size: int
    num_layers: int
    model_dim: int
    hidden_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_length: int
    norm: str
    epsilon: float
    activation: str
    tied: bool
    norms_above_one: bool = False
    output_norms: bool = False
    head_norms: bool = False
    parallel: bool = False
    rotary_base: float | None = None
    rotary_scaling: Mapping[str, Any] | None = None
    rotary_dim: int | None = None
    unused_positions: int = 0
    windows: tuple[int | None, ...] = ()
    score_scale: float | None = None
    score_cap: float | None = None
    logit_cap: float | None = None
    attention_bias: bool = False
    out_bias: bool = False
    feed_forward_bias: bool = False
    num_experts: int = 0
    scaled_embedding: bool = False
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    kind: str = "decoder"
    num_decoder_layers: int = 0
    token_types: int = 0
    relative_buckets: int = 0
    relative_max_distance: int = 128
    logit_scale: float = 1.0
    start: int = 0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Returns whether the feed-forward layers have a gate."""
        return self.activation in _GATED


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """One type of models: how to read its `config.json`, and where its weights are in files.

    Names of modules in files have no `.weight` or `.bias`. `modules` has those of a block, by the
    name here: norms, and matmuls without `w_` and `b_`. Several matmuls with one name are one
    tensor there, in this order. A name with `{}` has one tensor for each expert.

    Attributes:
        read: makes a `Config` of the values of a file.
        prefix: begins all names but the head's; files of a model without logits omit it.
        blocks: the name of a block after the prefix, with `{}` for its number.
        table: the embedding's table.
        positions: the table of learned positions.
        norm: the last norm.
        head: the matmul of the logits.
        modules: the modules of a block.
        transposed: whether matmuls are `outputs;inputs` in files.
        decoder_blocks: as `blocks`, of the decoder behind an encoder.
        decoder_modules: as `modules`, of such a block.
        ungated: a part of the names of modules, and its replacement in models without gates.
        memory_norm: the norm of the encoder's outputs.
        types: the table of token types.
        embedding_norm: the norm behind the embedding.
        transform: the matmul before the last norm.
        copies: names under which a file may repeat the embedding's table.
        unused: begins the names of tensors that the model does not use.
        older: ends of names, and those that older files have instead.
        by_head: whether matmuls in one tensor alternate head by head.
        ignored: keys of `config.json` that do not change what the model computes.
    """

    read: Callable[[Given], Config]
    prefix: str
    blocks: str
    table: str
    norm: str
    modules: Mapping[str, str]
    positions: str = ""
    head: str = "lm_head"
    decoder_blocks: str = ""
    decoder_modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    ungated: tuple[str, str] = ("", "")
    memory_norm: str = ""
    types: str = ""
    embedding_norm: str = ""
    transform: str = ""
    copies: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    older: Mapping[str, str] = dataclasses.field(default_factory=dict)
    transposed: bool = True
    by_head: bool = False
    ignored: frozenset[str] = frozenset()


def rate(given: Given, name: str, default: float) -> float:
    """Returns a rate of dropout."""
    found = given.number(name, default, zero=True)
    if found >= 1:
        raise given.error(name, found, "a rate of dropout is below 1")
    return found


def equal_heads(given: Given, size: str, model_dim: int, number: str, num_heads: int) -> int:
    """Returns the size of a head if the heads share a token's vector."""
    if model_dim % num_heads:
        raise WeightsError(
            f"{given.path}: {size} is {model_dim}, which {number} {num_heads} does not divide"
        )
    return model_dim // num_heads


def tokens(given: Given, vocab_size: int) -> dict[str, Any]:
    """Returns the fields of the tokens that start and end a text."""
    bos = given.tokens("bos_token_id", vocab_size)
    return {"bos": bos[0] if bos else None, "eos": given.tokens("eos_token_id", vocab_size)}


def notes(given: Given, name: str, default: float) -> tuple[str, ...]:
    """Lists the differences from `transformers`: `name` is attention's dropout rate."""
    if found := rate(given, name, default):
        given.notes.append(
            f"in training no weight of attention is dropped, where {name} is {found}"
        )
    return tuple(given.notes)


def rotations(
    given: Given,
    head_dim: int,
    *,
    base_name: str = "rope_theta",
    base: float = 1e4,
    part_name: str = "partial_rotary_factor",
    part: float | None = None,
) -> dict[str, Any]:
    """Returns the fields of rotations, which older files store elsewhere than newer ones.

    `part` is the default for the rotated part of a head; None if whole heads are rotated.
    """
    names = {"rope_theta": base_name, "partial_rotary_factor": part_name}
    outside = {name: given.get(name) for name in names.values()}
    values, scaling = {name: outside[name] for name in outside if name in given.values}, None
    places = {name: given.get(name) for name in ("rope_scaling", "rope_parameters")}
    if None not in places.values():
        raise WeightsError(f"{given.path} has {' and '.join(places)}; remove one of them")
    for name, found in places.items():
        if found is None:
            continue
        if not isinstance(found, dict):
            raise given.error(name, found, "it is an object of JSON")
        below = Given(found, f"{given.path}: {name}")
        kind = found.get("rope_type", found.get("type", "default"))
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise WeightsError(
                f"{given.path}: rope_type is {kind!r}; supported are {', '.join(_SCALINGS)}"
            )
        scaling = _SCALINGS[kind](below)
        values |= {own: found[inside] for inside, own in names.items() if inside in found}
        below.check_rest(("rope_type", "type", *names))
    read = Given(values, given.path)
    if part is None:
        read.only(part_name, [1.0], "whole heads are rotated")
    factor = read.number(part_name, part or 1.0)
    rotary_dim = int(head_dim * factor)
    if factor > 1 or rotary_dim % 2 or not rotary_dim:
        what = f"the part {factor} of heads" if factor != 1 else "heads"
        raise WeightsError(
            f"{given.path}: {what} have {rotary_dim} elements, but pairs of them are rotated"
        )
    return {
        "rotary_base": read.number(base_name, base),
        "rotary_scaling": scaling,
        "rotary_dim": None if rotary_dim == head_dim else rotary_dim,
    }


def _by_a_factor(part: Given) -> Mapping[str, Any]:
    return {"factor": part.at_least_one("factor")}


def _by_frequency(part: Given) -> Mapping[str, Any]:
    """Reads the scaling of Dubey et al., 2024."""
    low, high = part.number("low_freq_factor", None), part.number("high_freq_factor", None)
    if not low < high:
        raise WeightsError(
            f"{part.path}: low_freq_factor is {low} and high_freq_factor {high}, which is to be "
            "the greater one"
        )
    length = part.whole("original_max_position_embeddings", None)
    return {**_by_a_factor(part), "length": length, "low": low, "high": high}


# Scalings of rotations, by the type in the file.
_SCALINGS: Mapping[str, Callable[[Given], Mapping[str, Any] | None]] = {
    "default": lambda part: None,
    "linear": _by_a_factor,
    "llama3": _by_frequency,
}


def windows(given: Given, window: int | None, sliding: list[bool]) -> tuple[int | None, ...]:
    """Returns the window of each block; `sliding` says which have one if no `layer_types` do."""
    types = given.get("layer_types")
    if types is not None:
        known = ("full_attention", "sliding_attention")
        if not isinstance(types, list) or [each for each in types if each not in known]:
            raise given.error("layer_types", types, f"it is a list of {' and '.join(known)}")
        if len(types) != len(sliding):
            raise given.error("layer_types", types, f"there are {len(sliding)} layers")
        sliding = [each == known[1] for each in types]
        if any(sliding) and window is None:
            raise given.error("layer_types", types, "but no sliding_window is in use")
    return tuple(window if each else None for each in sliding) if any(sliding) else ()
