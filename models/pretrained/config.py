"""Reads and checks `config.json`, the sizes of a model of the package `transformers`."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipemesh.errors import PipemeshError
from pipemesh.text import nearest_text

FILE = "config.json"
# The optional file with decoding settings beside it.
GENERATION = "generation_config.json"
# Names of activations in `transformers`, and those of layers with named dims.
_ACTIVATIONS = {
    "gelu": "GELU",
    "gelu_new": "GELU_APPROXIMATE",
    "gelu_pytorch_tanh": "GELU_APPROXIMATE",
    "relu": "RELU",
}
_GATED_ACTIVATIONS = {"silu": "SWIGLU", "swish": "SWIGLU"}
_ROTARY_BASE = 1e4
# The largest size of anything.
_MOST = 2**31 - 1


class WeightsError(PipemeshError, ValueError):
    """Unusable weights, or unusable files beside them."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The sizes and options of a language model.

    Attributes:
        model_type: one of `MODEL_TYPES`.
        vocab_size: number of tokens.
        num_layers: number of blocks.
        model_dim: size of a token's vector.
        hidden_dim: size of the feed-forward layers' hidden vectors.
        num_heads: heads of attention.
        num_kv_heads: heads of keys and values, a divisor of `num_heads`.
        head_dim: size of a head.
        max_length: most tokens in a row.
        epsilon: epsilon of the norms.
        activation: activation of the feed-forward layers, by its name here.
        rotary_base: base of rotary positions; None for learned positions.
        rotary_scaling: params of a `RotaryScaling`; None for none.
        attention_bias: whether the matmuls of attention have biases.
        feed_forward_bias: whether the matmuls of feed-forward layers have biases.
        tied: whether the logits use the embedding's table.
        embedding_dropout: dropout rate after the embedding.
        residual_dropout: dropout rate of what is added to the residuals.
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
    epsilon: float
    activation: str
    rotary_base: float | None
    attention_bias: bool
    feed_forward_bias: bool
    tied: bool
    rotary_scaling: Mapping[str, Any] | None = None
    embedding_dropout: float = 0.0
    residual_dropout: float = 0.0
    bos: int | None = None
    eos: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_gated(self) -> bool:
        """Returns whether the feed-forward layers have a gate."""
        return self.activation in _GATED_ACTIVATIONS.values()


def read(path: str) -> Config:
    """Reads a `config.json`; raises WeightsError if it is unreadable, or its model is not
    supported.
    """
    return of_values(json_object(path), path)


def of_folder(folder: str) -> Config:
    """Reads the `config.json` of a log directory, or of a folder of weights."""
    path = os.path.join(folder, FILE)
    if not os.path.exists(path):
        raise WeightsError(
            f"there is no {path}, which says how large the model is; give as --logdir a folder "
            "that has one, whichever checkpoint is taken, or begin with `pipemesh checkpoint "
            "import --from=model.safetensors --logdir=RUN`"
        )
    return read(path)


def ends_of(folder: str, config: Config) -> tuple[frozenset[int], tuple[str, ...]]:
    """Returns the tokens that end a text, and notes about tokens that the model lacks.

    A `generation_config.json` in the folder overrides the model's file.
    """
    path = os.path.join(folder, GENERATION)
    if not os.path.exists(path):
        return frozenset(config.eos), ()
    given = _Given(json_object(path), path)
    ends = given.tokens("eos_token_id", config.vocab_size) or config.eos
    return frozenset(ends), tuple(given.notes)


def json_object(path: str) -> dict[str, Any]:
    """Reads a JSON object; raises WeightsError for an unreadable file or another value."""
    try:
        with open(path, "rb") as file:
            content = file.read()
    except OSError as error:
        raise WeightsError(
            f"{path!r} cannot be read ({error.strerror}); give the one that came with the weights"
        ) from error
    return parse_object(content, path)


def parse_object(content: bytes, path: str) -> dict[str, Any]:
    """Parses a JSON object of the file `path`; raises WeightsError for another value, or for a name
    that an object has twice.
    """

    def unique(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise WeightsError(f"{path!r} has {twice!r} twice; fetch it again")
        return values

    try:
        values = json.loads(content.decode("utf-8"), object_pairs_hook=unique)
    except WeightsError:
        raise
    except RecursionError as error:
        raise WeightsError(f"{path!r} is no JSON of a model (nested too deeply)") from error
    except ValueError as error:
        raise WeightsError(f"{path!r} is no JSON ({error})") from error
    if not isinstance(values, dict):
        raise WeightsError(f"{path!r} holds no object of JSON")
    return values


def of_values(values: Mapping[str, Any], path: str = FILE) -> Config:
    """Returns the model in the values of a `config.json`; errors name `path`.

    Example:
        >>> config = of_values({"model_type": "gpt2", "n_layer": 2})
        >>> config.num_layers, config.model_dim, config.hidden_dim, config.activation
        (2, 768, 3072, 'GELU_APPROXIMATE')
        >>> of_values({"model_type": "llama", "rope_scaling": {"rope_type": "yarn"}})
        Traceback (most recent call last):
        models.pretrained.config.WeightsError: config.json: rope_type is 'yarn'; supported are \
default, linear, llama3
    """
    model_type = values.get("model_type")
    if not isinstance(model_type, str) or model_type not in MODEL_TYPES:
        near = nearest_text(str(model_type), MODEL_TYPES)
        raise WeightsError(f"{path}: model_type is {model_type!r}{near}")
    given = _Given(values, path)
    for name in ("quantization_config", "auto_map"):
        given.only(name, [None], "weights are numbers, and the model is what its type says")
    return MODEL_TYPES[model_type](given)


class _Given:
    """The values of a file, checked when they are read, with notes about ignored ones."""

    def __init__(self, values: Mapping[str, Any], path: str) -> None:
        self.values, self.path = values, path
        self.notes: list[str] = []

    def whole(self, name: str, default: int | None) -> int:
        value = self._of(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST:
            raise self._error(name, value, f"it is a whole number from 1 to {_MOST:,}")
        return value

    def at_least_one(self, name: str) -> float:
        value = self.number(name, None)
        if value < 1:
            raise self._error(name, value, "it is 1 or more")
        return value

    def number(self, name: str, default: float | None, *, zero: bool = False) -> float:
        value = self._of(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._error(name, value, "it is a number")
        if not (value > 0 or (zero and value == 0)):
            raise self._error(name, value, "it is above 0")
        if value > sys.float_info.max:
            raise self._error(name, value, "it is finite")
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self._of(name, default)
        if not isinstance(value, bool):
            raise self._error(name, value, "it is true or false")
        return value

    def choice(self, name: str, default: str, known: Mapping[str, str]) -> str:
        value = self._of(name, default)
        if not isinstance(value, str) or value not in known:
            raise self._error(name, value, f"there are {', '.join(sorted(known))}")
        return known[value]

    def only(self, name: str, allowed: Sequence[Any], why: str) -> None:
        value = self.values.get(name, allowed[0])
        if value not in allowed:
            told = " or ".join(json.dumps(each) for each in allowed)
            raise self._error(name, value, f"{why}: it may be {told}")

    def tokens(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """Returns the tokens of the vocabulary, and adds notes about others, which nothing can
        produce.
        """
        value = self.values.get(name)
        found = value if isinstance(value, list) else [] if value is None else [value]
        if not all(type(each) is int and each >= 0 for each in found):
            raise self._error(name, value, "it is the number of a token, or a list of them")
        beyond = [str(each) for each in found if each >= vocab_size]
        if beyond:
            self.notes.append(
                f"{self.path}: {name} {', '.join(beyond)} plays no part: the model has "
                f"the ids 0 to {vocab_size - 1}"
            )
        return tuple(each for each in found if each < vocab_size)

    def _of(self, name: str, default: Any) -> Any:
        value = self.values.get(name)
        value = default if value is None else value
        if value is None:
            raise WeightsError(f"{self.path} has no {name!r}, which its model needs")
        return value

    def _error(self, name: str, value: Any, told: str) -> WeightsError:
        return WeightsError(f"{self.path}: {name} is {value!r}; {told}")


def _gpt2(given: _Given) -> Config:
    """Reads a GPT-2 model (Radford et al., 2019); defaults are those of the smallest one."""
    why = "attention divides by the root of a head's size, and looks at its own text"
    given.only("scale_attn_weights", [True, None], why)
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        given.only(name, [False, None], why)
    model_dim, num_heads = given.whole("n_embd", 768), given.whole("n_head", 12)
    vocab_size = given.whole("vocab_size", 50257)
    bos, eos = _marks(given, vocab_size)
    return Config(
        model_type="gpt2",
        vocab_size=vocab_size,
        num_layers=given.whole("n_layer", 12),
        model_dim=model_dim,
        hidden_dim=given.whole("n_inner", 4 * model_dim),
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_dim=_head_dim(given, "n_embd", model_dim, "n_head", num_heads),
        max_length=given.whole("n_positions", 1024),
        epsilon=given.number("layer_norm_epsilon", 1e-5),
        activation=given.choice("activation_function", "gelu_new", _ACTIVATIONS),
        rotary_base=None,
        attention_bias=True,
        feed_forward_bias=True,
        tied=given.flag("tie_word_embeddings", True),
        embedding_dropout=_rate(given, "embd_pdrop", 0.1),
        residual_dropout=_rate(given, "resid_pdrop", 0.1),
        bos=bos,
        eos=eos,
        notes=_notes(given, "attn_pdrop", 0.1),
    )


def _llama(given: _Given) -> Config:
    """Reads a Llama model (Touvron et al., 2023); defaults are those of the smallest one."""
    given.only("partial_rotary_factor", [None, 1, 1.0], "whole heads are rotated")
    model_dim = given.whole("hidden_size", 4096)
    num_heads = given.whole("num_attention_heads", 32)
    num_kv_heads = given.whole("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise WeightsError(
            f"{given.path}: num_key_value_heads is {num_kv_heads}, which does not divide "
            f"num_attention_heads {num_heads}"
        )
    head_dim = given.values.get("head_dim")
    if head_dim is None:
        of = "hidden_size", model_dim, "num_attention_heads", num_heads
        head_dim = _head_dim(given, *of)
    else:
        head_dim = given.whole("head_dim", None)
    if head_dim % 2:
        raise WeightsError(
            f"{given.path}: heads have {head_dim} elements, but pairs of them are rotated"
        )
    vocab_size = given.whole("vocab_size", 32000)
    bos, eos = _marks(given, vocab_size)
    base, scaling = _rotations(given)
    return Config(
        model_type="llama",
        vocab_size=vocab_size,
        num_layers=given.whole("num_hidden_layers", 32),
        model_dim=model_dim,
        hidden_dim=given.whole("intermediate_size", 11008),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_length=given.whole("max_position_embeddings", 2048),
        epsilon=given.number("rms_norm_eps", 1e-6),
        activation=given.choice("hidden_act", "silu", _GATED_ACTIVATIONS),
        rotary_base=base,
        rotary_scaling=scaling,
        attention_bias=given.flag("attention_bias", False),
        feed_forward_bias=given.flag("mlp_bias", False),
        tied=given.flag("tie_word_embeddings", False),
        bos=bos,
        eos=eos,
        notes=_notes(given, "attention_dropout", 0.0),
    )


# By the name in the file.
MODEL_TYPES = {"gpt2": _gpt2, "llama": _llama}


def _rotations(given: _Given) -> tuple[float, Mapping[str, Any] | None]:
    """Returns base and scaling of rotations, which older files store elsewhere than newer ones."""
    base, scaling = given.values.get("rope_theta"), None
    for name in ("rope_scaling", "rope_parameters"):
        found = given.values.get(name)
        if found is None:
            continue
        if not isinstance(found, dict):
            raise WeightsError(f"{given.path}: {name} is {found!r}; it is an object of JSON")
        part = _Given(found, f"{given.path}: {name}")
        part.only("partial_rotary_factor", [None, 1, 1.0], "whole heads are rotated")
        kind = found.get("rope_type", found.get("type", "default"))
        if not isinstance(kind, str) or kind not in _SCALINGS:
            raise WeightsError(
                f"{given.path}: rope_type is {kind!r}; supported are {', '.join(_SCALINGS)}"
            )
        scaling = _SCALINGS[kind](part)
        base = found.get("rope_theta", base)
    number = _Given({"rope_theta": base}, given.path).number("rope_theta", _ROTARY_BASE)
    return number, scaling


def _by_a_factor(part: _Given) -> Mapping[str, Any]:
    return {"factor": part.at_least_one("factor")}


def _by_frequency(part: _Given) -> Mapping[str, Any]:
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
_SCALINGS: Mapping[str, Callable[[_Given], Mapping[str, Any] | None]] = {
    "default": lambda part: None,
    "linear": _by_a_factor,
    "llama3": _by_frequency,
}


def _head_dim(given: _Given, size: str, model_dim: int, number: str, num_heads: int) -> int:
    if model_dim % num_heads:
        raise WeightsError(
            f"{given.path}: {size} is {model_dim}, which {number} {num_heads} does not divide"
        )
    return model_dim // num_heads


def _rate(given: _Given, name: str, default: float) -> float:
    rate = given.number(name, default, zero=True)
    if rate >= 1:
        raise WeightsError(f"{given.path}: {name} is {rate}; a rate of dropout is below 1")
    return rate


def _marks(given: _Given, vocab_size: int) -> tuple[int | None, tuple[int, ...]]:
    """Returns the token that starts a text, and the tokens that end one."""
    bos = given.tokens("bos_token_id", vocab_size)
    return bos[0] if bos else None, given.tokens("eos_token_id", vocab_size)


def _notes(given: _Given, name: str, default: float) -> tuple[str, ...]:
    """Lists the differences from `transformers`: `name` is attention's dropout rate."""
    if rate := _rate(given, name, default):
        given.notes.append(f"in training no weight of attention is dropped, where {name} is {rate}")
    return tuple(given.notes)
