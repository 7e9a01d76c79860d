"""A table of weights: names and layouts here and in files of `transformers`.

One table serves both directions. Matmul weights are `inputs;outputs` here, with a dim for heads.
Files have one dim for all heads, and except for GPT-2 they are transposed. Several weights here may
be one tensor there: GPT-2 computes queries, keys and values in one matmul.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.text import nearest

from .config import Config, WeightsError

# The name of the task, which prefixes the names of its weights.
TASK = "language_model"
# Tensors in files that are not weights: masks, and the wavelengths of rotations.
_CONSTANTS = ("attn.bias", "attn.masked_bias", "rotary_emb.inv_freq")
# The prefix of all names but the logits'; files of a model without logits omit it.
_PREFIXES = {"gpt2": "transformer.", "llama": "model."}
HEAD = "lm_head.weight"


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight here, and its position in a file.

    Attributes:
        name: its name in a checkpoint.
        shape: its shape here.
        theirs: the name of the tensor in the file.
        there: the shape of that whole tensor.
        transposed: whether the file has it transposed.
        part: index of its part of that tensor's last dim.
        parts: number of equal parts.

    Example:
        >>> weight = Weight("w_k", (2, 2, 1), "c_attn", (2, 6), part=1, parts=3)
        >>> found = weight.from_theirs(np.arange(12).reshape(2, 6)[weight.index])
        >>> found.tolist(), weight.to_theirs(found).tolist()
        ([[[2], [3]], [[8], [9]]], [[2, 3], [8, 9]])
    """

    name: str
    shape: tuple[int, ...]
    theirs: str
    there: tuple[int, ...]
    transposed: bool = False
    part: int = 0
    parts: int = 1

    @property
    def index(self) -> tuple[slice, ...]:
        """Returns the slice of the tensor in the file."""
        size = self.there[-1] // self.parts
        whole = (slice(None),) * (len(self.there) - 1)
        return *whole, slice(self.part * size, (self.part + 1) * size)

    def from_theirs(self, value: np.ndarray) -> np.ndarray:
        """Converts a slice from the file to the layout used here."""
        return (value.T if self.transposed else value).reshape(self.shape)

    def to_theirs(self, value: np.ndarray) -> np.ndarray:
        """Converts a weight to the layout of the file."""
        sizes = (*self.there[:-1], self.there[-1] // self.parts)
        return value.reshape(sizes[::-1]).T if self.transposed else value.reshape(sizes)


def joined(weights: Sequence[Weight], values: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the tensor in the file of which the weights are the parts."""
    found = [weight.to_theirs(value) for weight, value in zip(weights, values, strict=True)]
    return np.concatenate(found, -1) if len(found) > 1 else found[0]


def weights_of(config: Config) -> list[Weight]:
    """Returns all weights of a model; parts of one tensor follow each other."""
    build = {"gpt2": _gpt2_block, "llama": _llama_block}[config.model_type]
    outside = {"gpt2": _gpt2_outside, "llama": _llama_outside}[config.model_type]
    blocks = range(config.num_layers)
    within = [build(config, f"cell_{1 + i:03d}", i) for i in blocks]
    return [*outside(config), *itertools.chain.from_iterable(within)]


def by_theirs(weights: Sequence[Weight]) -> Iterator[tuple[str, list[Weight]]]:
    """Yields the weights by the name of the tensor in the file."""
    for theirs, parts in itertools.groupby(weights, key=lambda weight: weight.theirs):
        yield theirs, list(parts)


def as_in(names: Collection[str], weights: Sequence[Weight], config: Config) -> list[Weight]:
    """Returns the weights with the names in some files; raises WeightsError if tensors are missing
    or unknown.
    """
    prefix = _PREFIXES[config.model_type]
    if not any(name.startswith(prefix) for name in names):
        weights = [
            dataclasses.replace(weight, theirs=weight.theirs.removeprefix(prefix))
            for weight in weights
        ]
    wanted = {weight.theirs for weight in weights}
    for theirs, _ in by_theirs(weights):
        if theirs not in names:
            near = nearest(theirs, names)
            hint = f"; the nearest that there is is {near!r}" if near else ""
            raise WeightsError(f"there is no tensor {theirs!r}, which {_told(config)} has{hint}")
    spare = {name for name in names if name.endswith(_CONSTANTS)}
    # This equals the embedding's table, which the reader checks.
    spare |= {HEAD} if config.tied else set()
    if beyond := sorted(set(names) - wanted - spare):
        raise WeightsError(
            f"there are {len(beyond)} tensors that {_told(config)} has not, such as {beyond[0]!r}"
        )
    return list(weights)


def table_of(weights: Iterable[Weight]) -> Weight:
    """Returns the table of the embedding, which logits may share."""
    return next(weight for weight in weights if weight.name == _name("cell_000", "table"))


def tied_of(config: Config) -> dict[str, str]:
    """Returns the weights that the last layer shares with the first, as `tied_weights` of a
    stack.
    """
    return {f"{_last(config)}.w": "cell_000.table"} if config.tied else {}


def _told(config: Config) -> str:
    return f"the model of config.json ({config.model_type}, {config.num_layers} layers)"


def _name(cell: str, weight: str) -> str:
    return f"{TASK}/{cell}/{weight}/var"


def _last(config: Config) -> str:
    return f"cell_{1 + config.num_layers:03d}"


def _same(cell: str, name: str, theirs: str, *shape: int) -> Weight:
    return Weight(_name(cell, name), shape, theirs, shape)


def _product(cell: str, name: str, theirs: str, shape: Any, inputs: int) -> Weight:
    """Returns a matmul weight that is transposed in files, with one dim for inputs and one for
    outputs.
    """
    outputs = int(np.prod(shape)) // inputs
    return Weight(_name(cell, name), tuple(shape), theirs, (outputs, inputs), transposed=True)


def _flat(cell: str, name: str, theirs: str, *shape: int) -> Weight:
    """Returns a weight with heads that is a vector in files."""
    return Weight(_name(cell, name), shape, theirs, (int(np.prod(shape)),))


def _outside(config: Config, table: str, norm: str) -> list[Weight]:
    vocab, embed, last = config.vocab_size, config.model_dim, _last(config)
    found = [
        _same("cell_000", "table", table, vocab, embed),
        _same(last, "norm/scale", f"{norm}.weight", embed),
    ]
    if not config.tied:
        found.append(_product(last, "w", HEAD, (embed, vocab), embed))
    return found


def _gpt2_outside(config: Config) -> list[Weight]:
    embed = config.model_dim
    return [
        *_outside(config, "transformer.wte.weight", "transformer.ln_f"),
        _same("cell_000", "positions", "transformer.wpe.weight", config.max_length, embed),
        _same(_last(config), "norm/bias", "transformer.ln_f.bias", embed),
    ]


def _gpt2_block(config: Config, cell: str, number: int) -> list[Weight]:
    embed, hidden = config.model_dim, config.hidden_dim
    heads, of = (config.num_heads, config.head_dim), f"transformer.h.{number}"
    found = [
        _same(cell, f"{ours}/{part}", f"{of}.{theirs}.{word}", embed)
        for ours, theirs in (("attention_norm", "ln_1"), ("feed_forward_norm", "ln_2"))
        for part, word in (("scale", "weight"), ("bias", "bias"))
    ]
    for kind, word, rows in (("w", "weight", (embed,)), ("b", "bias", ())):
        found += [
            Weight(
                _name(cell, f"attention/{kind}_{letter}"),
                (*rows, *heads),
                f"{of}.attn.c_attn.{word}",
                (*rows, 3 * embed),
                part=part,
                parts=3,
            )
            for part, letter in enumerate("qkv")
        ]
    out = f"{of}.attn.c_proj.weight"
    return [
        *found,
        Weight(_name(cell, "attention/w_out"), (*heads, embed), out, (embed, embed)),
        _same(cell, "attention/b_out", f"{of}.attn.c_proj.bias", embed),
        _same(cell, "feed_forward/w_in", f"{of}.mlp.c_fc.weight", embed, hidden),
        _same(cell, "feed_forward/b_in", f"{of}.mlp.c_fc.bias", hidden),
        _same(cell, "feed_forward/w_out", f"{of}.mlp.c_proj.weight", hidden, embed),
        _same(cell, "feed_forward/b_out", f"{of}.mlp.c_proj.bias", embed),
    ]


def _llama_outside(config: Config) -> list[Weight]:
    return _outside(config, "model.embed_tokens.weight", "model.norm")


def _llama_block(config: Config, cell: str, number: int) -> list[Weight]:
    embed, hidden, of = config.model_dim, config.hidden_dim, f"model.layers.{number}"
    found = [
        _same(cell, "attention_norm/scale", f"{of}.input_layernorm.weight", embed),
        _same(cell, "feed_forward_norm/scale", f"{of}.post_attention_layernorm.weight", embed),
    ]
    heads = config.num_heads, config.head_dim
    keys = config.num_kv_heads, config.head_dim
    for letter, sizes in (("q", heads), ("k", keys), ("v", keys)):
        theirs = f"{of}.self_attn.{letter}_proj"
        found.append(
            _product(cell, f"attention/w_{letter}", f"{theirs}.weight", (embed, *sizes), embed)
        )
        if config.attention_bias:
            found.append(_flat(cell, f"attention/b_{letter}", f"{theirs}.bias", *sizes))
    theirs, inputs = f"{of}.self_attn.o_proj", config.num_heads * config.head_dim
    found.append(_product(cell, "attention/w_out", f"{theirs}.weight", (*heads, embed), inputs))
    if config.attention_bias:
        found.append(_same(cell, "attention/b_out", f"{theirs}.bias", embed))
    for ours, word, sizes in (
        ("in", "up", (embed, hidden)),
        ("gate", "gate", (embed, hidden)),
        ("out", "down", (hidden, embed)),
    ):
        theirs = f"{of}.mlp.{word}_proj"
        found.append(_product(cell, f"feed_forward/w_{ours}", f"{theirs}.weight", sizes, sizes[0]))
        if config.feed_forward_bias:
            found.append(_same(cell, f"feed_forward/b_{ours}", f"{theirs}.bias", sizes[1]))
    return found
