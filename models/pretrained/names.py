"""A table of weights: names and layouts here and in files of `transformers`.

One table serves both directions. Matmul weights are `inputs;outputs` here, with a dim for heads.
Files have one dim for all heads, and except for GPT-2 they are transposed. Several weights here may
be one tensor there: GPT-2 computes queries, keys and values in one matmul. One weight here may be
several tensors there: one for each expert.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipemesh.text import nearest

from .families import FAMILIES, Config, Family
from .values import WeightsError

# The name of the task, which prefixes the names of its weights.
TASK = "language_model"
# Tensors in files that are not weights: masks, and the wavelengths of rotations.
_CONSTANTS = (
    "attn.bias",
    "attn.masked_bias",
    "attention.bias",
    "attention.masked_bias",
    "embeddings.position_ids",
    "rotary_emb.inv_freq",
)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A weight here, or an expert's part of one, and its position in a file.

    Attributes:
        name: its name in a checkpoint.
        shape: its shape here, of all experts.
        theirs: the name of the tensor in the file.
        there: the shape of that whole tensor.
        transposed: whether the file has it transposed.
        start: where its part of the tensor's outputs begins: the first dim if transposed, or else
            the last one.
        size: size of that part; None for the whole tensor.
        groups: number of equal groups of outputs, each with such a part: one, or the heads.
        expert: the expert whose weight the file has; None if there are none.

    Example:
        >>> weight = Weight("w_k", (2, 2, 1), "c_attn", (2, 6), start=2, size=2)
        >>> here = np.zeros(weight.shape)
        >>> weight.as_theirs(here)[...] = np.arange(12).reshape(weight.grouped)[weight.index]
        >>> here.tolist(), joined([weight], [here])[:, weight.index[1]].tolist()
        ([[[2.0], [3.0]], [[8.0], [9.0]]], [[2.0, 3.0], [8.0, 9.0]])
    """

    name: str
    shape: tuple[int, ...]
    theirs: str
    there: tuple[int, ...]
    transposed: bool = False
    start: int = 0
    size: int | None = None
    groups: int = 1
    expert: int | None = None

    @property
    def index(self) -> tuple[slice, ...]:
        """Returns the slice of the tensor in the file, as `grouped`, from which it is made."""
        index = [slice(None)] * len(self.grouped)
        if self.size is not None:
            outputs = len(index) - len(self.there) if self.transposed else -1
            index[outputs] = slice(self.start, self.start + self.size)
        return tuple(index)

    @property
    def grouped(self) -> tuple[int, ...]:
        """Returns the shape of the tensor in the file; several groups have a dim."""
        if self.groups == 1:
            return self.there
        return (self.groups, self.there[0] // self.groups, *self.there[1:])

    def as_theirs(self, value: np.ndarray) -> np.ndarray:
        """Returns a view of the weight, of all experts, as its slice of the file is."""
        value = value if self.expert is None else value[self.expert]
        if self.transposed:
            value = value.reshape(self.there[-1], -1).T
        slices = zip(self.grouped, self.index, strict=True)
        return value.reshape([len(range(size)[kept]) for size, kept in slices])

    def put(self, value: np.ndarray, whole: np.ndarray) -> None:
        """Writes the weight, of all experts, into the whole tensor of the file."""
        whole.reshape(self.grouped)[self.index] = self.as_theirs(value)


def joined(weights: Sequence[Weight], values: Iterable[np.ndarray]) -> np.ndarray:
    """Returns the tensor in the file of which the weights are the parts, uncopied if it is one."""
    first, whole = weights[0], None
    if len(weights) == 1 and first.size is None and first.expert is None:
        return first.as_theirs(*values)
    for weight, value in zip(weights, values, strict=True):
        if whole is None:
            whole = np.empty(weight.there, value.dtype)
        # A weight with an adapter is float32, beside others that the file may have as bfloat16.
        whole = whole.astype(np.result_type(whole, value), copy=False)
        weight.put(value, whole)
        # So that the next value does not find this one in memory.
        del value
    assert whole is not None
    return whole


def weights_of(config: Config) -> list[Weight]:
    """Returns all weights of a model; parts of one tensor, and of one weight, follow each other."""
    family = FAMILIES[config.model_type]
    found = _outside(family, config)
    norms, matmuls = _norms(config), _matmuls(config)
    for cell, prefix, modules, is_first in _blocks(family, config):
        if config.relative_buckets and is_first:
            ours, sizes = "attention/relative_bias", (config.relative_buckets, config.num_heads)
            found.append(_same(cell, ours, f"{prefix}{modules[ours]}.weight", *sizes))
        for ours, dim in norms.items():
            if ours in modules:
                found += _norm(config, cell, ours, prefix + modules[ours], dim)
        # Matmuls with one name are parts of one tensor.
        there = [ours for ours in modules if ours in matmuls]
        for theirs, parts in itertools.groupby(there, modules.__getitem__):
            group = {ours: matmuls[ours] for ours in parts}
            found += _parts(family, config, cell, prefix + theirs, group)
    return found


def _blocks(family: Family, config: Config) -> Iterator[tuple[str, str, Mapping[str, str], bool]]:
    """Yields the cell of each block, its prefix and modules in files, and whether it is the first
    of its side.
    """
    sides = [(1, config.num_layers, family.blocks, family.modules)]
    if config.num_decoder_layers:
        first = 2 + config.num_layers
        number = config.num_decoder_layers
        sides.append((first, number, family.decoder_blocks, family.decoder_modules))
    for first, number, blocks, modules in sides:
        if not config.is_gated:
            modules = {ours: name.replace(*family.ungated) for ours, name in modules.items()}
        for i in range(number):
            yield f"cell_{first + i:03d}", family.prefix + blocks.format(i), modules, i == 0


def by_theirs(weights: Sequence[Weight]) -> Iterator[tuple[str, list[Weight]]]:
    """Yields the weights by the name of the tensor in the file."""
    for theirs, parts in itertools.groupby(weights, key=lambda weight: weight.theirs):
        yield theirs, list(parts)


def by_ours(weights: Sequence[Weight]) -> Iterator[tuple[str, list[Weight]]]:
    """Yields the weights by the name here."""
    for name, parts in itertools.groupby(weights, key=lambda weight: weight.name):
        yield name, list(parts)


def as_in(names: Collection[str], weights: Sequence[Weight], config: Config) -> list[Weight]:
    """Returns the weights with the names in some files; raises WeightsError if tensors are missing
    or unknown.
    """
    family = FAMILIES[config.model_type]
    prefix = family.prefix
    if not any(name.startswith(prefix) for name in names):
        weights = [
            dataclasses.replace(weight, theirs=weight.theirs.removeprefix(prefix))
            for weight in weights
        ]
    weights = [
        dataclasses.replace(weight, theirs=_name_in(names, weight.theirs, family))
        for weight in weights
    ]
    wanted = {weight.theirs for weight in weights}
    for theirs, _ in by_theirs(weights):
        if theirs not in names:
            near = nearest(theirs, names)
            hint = f"; the nearest that there is is {near!r}" if near else ""
            raise WeightsError(f"there is no tensor {theirs!r}, which {_told(config)} has{hint}")
    spare = {name for name in names if name.endswith(_CONSTANTS)}
    # The reader checks that these are equal.
    spare |= copies_of(config).keys() | set(unused_in(names, config))
    if beyond := sorted(set(names) - wanted - spare):
        raise WeightsError(
            f"there are {len(beyond)} tensors that {_told(config)} has not, such as {beyond[0]!r}"
        )
    return list(weights)


def _name_in(names: Collection[str], theirs: str, family: Family) -> str:
    """Returns the older name of a tensor if some files have that one."""
    for new, old in family.older.items():
        name = f"{theirs.removesuffix(new)}{old}"
        if theirs.endswith(new) and theirs not in names and name in names:
            return name
    return theirs


def head_of(config: Config) -> str:
    """Returns the name of the logits' matmul in files, which a model with one table lacks."""
    return f"{FAMILIES[config.model_type].head}.weight"


def copies_of(config: Config) -> dict[str, str]:
    """Returns the tensors that files may repeat, with the name here of the weight that each is."""
    family, table = FAMILIES[config.model_type], _name("cell_000", "table")
    found = dict.fromkeys(family.copies, table)
    if config.tied:
        found[head_of(config)] = table
    if config.kind == "encoder":
        found[f"{family.head}.bias"] = _name(_last(config), "b")
    return found


def unused_in(names: Collection[str], config: Config) -> list[str]:
    """Returns the tensors of a file that the model does not use."""
    return sorted(name for name in names if name.startswith(FAMILIES[config.model_type].unused))


def tied_of(config: Config) -> dict[str, str]:
    """Returns the weights that layers share, as `tied_weights` of a stack."""
    table, first = "cell_000.table", 2 + config.num_layers
    found = {f"{_last(config)}.w": table} if config.tied else {}
    if config.num_decoder_layers:
        found[f"cell_{first - 1:03d}.table"] = table
    if config.relative_buckets:
        for begin, number in ((1, config.num_layers), (first, config.num_decoder_layers)):
            bias, *others = (f"cell_{begin + i:03d}.attention.relative_bias" for i in range(number))
            found |= dict.fromkeys(others, bias)
    return found


def _told(config: Config) -> str:
    return f"the model of config.json ({config.model_type}, {config.num_layers} layers)"


def _name(cell: str, weight: str) -> str:
    return f"{TASK}/{cell}/{weight}/var"


def _last(config: Config) -> str:
    decoder = config.num_decoder_layers
    return f"cell_{1 + config.num_layers + (1 + decoder if decoder else 0):03d}"


@dataclasses.dataclass(frozen=True)
class _Matmul:
    """The dims of a matmul; `experts` have one each."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    bias: bool = False
    experts: int = 0

    @property
    def size(self) -> int:
        return math.prod(self.outputs)


def _norms(config: Config) -> dict[str, int]:
    """Returns the norms of a block, with the size of their weights."""
    halves = ["attention_norm", "cross_attention_norm", "feed_forward_norm"]
    if config.output_norms:
        halves += ["attention_output_norm", "feed_forward_output_norm"]
    heads = ["attention/q_norm", "attention/k_norm"] if config.head_norms else []
    return dict.fromkeys(halves, config.model_dim) | dict.fromkeys(heads, config.head_dim)


def _matmuls(config: Config) -> dict[str, _Matmul]:
    """Returns the matmuls of a block."""
    embed, hidden = (config.model_dim,), (config.hidden_dim,)
    heads, keys = (config.num_heads, config.head_dim), (config.num_kv_heads, config.head_dim)
    bias, experts = config.feed_forward_bias, config.num_experts
    found = {
        "attention/q": _Matmul(embed, heads, config.attention_bias),
        "attention/k": _Matmul(embed, keys, config.attention_bias),
        "attention/v": _Matmul(embed, keys, config.attention_bias),
        "attention/out": _Matmul(heads, embed, config.out_bias),
        "feed_forward/in": _Matmul(embed, hidden, bias, experts),
        "feed_forward/out": _Matmul(hidden, embed, bias, experts),
    }
    found |= {f"cross_{name}": each for name, each in found.items() if "attention" in name}
    if config.is_gated:
        found["feed_forward/gate"] = _Matmul(embed, hidden, bias, experts)
    if experts:
        found["feed_forward/router"] = _Matmul(embed, (experts,))
    return found


def _same(cell: str, name: str, theirs: str, *shape: int) -> Weight:
    return Weight(_name(cell, name), shape, theirs, shape)


def _norm(config: Config, cell: str, ours: str, theirs: str, dim: int) -> list[Weight]:
    kinds = {"scale": "weight", "bias": "bias"} if config.norm == "layer" else {"scale": "weight"}
    return [_same(cell, f"{ours}/{k}", f"{theirs}.{t}", dim) for k, t in kinds.items()]


def _outside(family: Family, config: Config) -> list[Weight]:
    """Returns the weights of the embedding and of the head."""
    vocab, embed, last = config.vocab_size, config.model_dim, _last(config)
    found = [_same("cell_000", "table", f"{family.prefix}{family.table}.weight", vocab, embed)]
    if family.positions:
        rows = config.max_length + config.unused_positions
        theirs = f"{family.prefix}{family.positions}.weight"
        found.append(_same("cell_000", "positions", theirs, rows, embed))
    if config.token_types:
        theirs = f"{family.prefix}{family.types}.weight"
        found.append(_same("cell_000", "types", theirs, config.token_types, embed))
    if family.embedding_norm:
        found += _norm(config, "cell_000", "norm", family.embedding_norm, embed)
    if family.memory_norm:
        cell = f"cell_{1 + config.num_layers:03d}"
        found += _norm(config, cell, "memory_norm", family.memory_norm, embed)
    if family.transform:
        square, theirs = (embed, embed), f"{family.transform}.weight"
        found.append(Weight(_name(last, "w_transform"), square, theirs, square, transposed=True))
        found.append(_same(last, "b_transform", f"{family.transform}.bias", embed))
    found += _norm(config, last, "norm", family.prefix + family.norm, embed)
    if config.kind == "encoder":
        found.append(_same(last, "b", f"{family.head.rpartition('.')[0]}.bias", vocab))
    if not config.tied:
        head = _name(last, "w"), (embed, vocab), head_of(config), (vocab, embed)
        found.append(Weight(*head, transposed=True))
    return found


def _parts(
    family: Family, config: Config, cell: str, theirs: str, group: Mapping[str, _Matmul]
) -> list[Weight]:
    """Returns the weights of matmuls that are one tensor in files, then their biases."""
    total = sum(matmul.size for matmul in group.values())
    groups = config.num_heads if family.by_head and len(group) > 1 else 1
    weights, biases, start = [], [], 0
    for ours, matmul in group.items():
        part: dict[str, Any] = {}
        if len(group) > 1:
            part = {"start": start // groups, "size": matmul.size // groups, "groups": groups}
        start += matmul.size
        inputs = math.prod(matmul.inputs)
        there = (total, inputs) if family.transposed else (inputs, total)
        half, _, kind = ours.partition("/")
        own = (matmul.experts,) if matmul.experts else ()
        weights += [
            Weight(
                _name(cell, f"{half}/w_{kind}"),
                (*own, *matmul.inputs, *matmul.outputs),
                f"{theirs.format(number)}.weight",
                there,
                transposed=family.transposed,
                expert=number if own else None,
                **part,
            )
            for number in range(matmul.experts or 1)
        ]
        if matmul.bias:
            biases.append(
                Weight(
                    _name(cell, f"{half}/b_{kind}"),
                    matmul.outputs,
                    f"{theirs}.bias",
                    (total,),
                    **part,
                )
            )
    return [*weights, *biases]
