"""Corruptions of rows: tokens that a model restores, as masks or as spans.

A corruption is a pure function of a row, with labels of the tokens themselves, and of random bits.
Pieces of documents that share a row are corrupted one by one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from pipemesh.data.documents import Spelling
from pipemesh.data.rows import Rows, empty_row
from pipemesh.errors import DataError

# Names of special tokens, and their texts where a tokenizer does not say them.
_SPECIAL = {
    "bos_token": None,
    "eos_token": None,
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "mask_token": "[MASK]",
}
# The sentinels of T5.
_SENTINEL = "<extra_id_{}>"

Row = Mapping[str, np.ndarray]
Corrupt = Callable[[Row, Any], dict[str, np.ndarray]]
"""A function of a row, as `Rows.read` returns it, and a bit generator."""


@dataclasses.dataclass(frozen=True)
class MaskedTokens:
    """Masks tokens, which the model predicts (Devlin et al., "BERT", 2019).

    Of each piece of a document a share of the tokens counts, at least one. Of these 80% become the
    mask, 10% a random token, and 10% stay. Special tokens, and tokens without a weight, never
    count.

    Attributes:
        rate: the share of tokens that count.

    Raises:
        DataError: the rate is not above 0 and below 1.
    """

    rate: float = 0.15

    def __post_init__(self) -> None:
        _check_rate(self.rate)

    def prepared(
        self, spelling: Spelling | None, vocab_size: int, rows: Sequence[Rows]
    ) -> tuple[Corrupt, int | None]:
        """Returns the function that masks rows, and None: a row stays one row.

        Raises:
            DataError: the tokenizer has no mask.
        """
        del rows
        found = {name: _special_id(spelling, name) for name in _SPECIAL}
        mask = found["mask_token"]
        if mask is None:
            raise DataError(
                "masked tokens need a tokenizer with a mask_token; put its files into the folder "
                "of the model"
            )
        special = np.array([each for each in found.values() if each is not None])

        def corrupt(row: Row, bits: Any) -> dict[str, np.ndarray]:
            ids, weights = row["ids"].copy(), np.zeros_like(row["weights"])
            for piece in _pieces(row):
                may = (row["weights"][piece] > 0) & ~np.isin(ids[piece], special)
                places = piece.start + np.flatnonzero(may)
                number = min(len(places), max(1, round(self.rate * len(places))))
                keys = bits.random_raw(len(places))
                chosen = np.sort(places[np.argsort(keys, kind="stable")[:number]])
                draws, others = _uniform(bits, number), _uniform(bits, number)
                others = (others * vocab_size).astype(np.int32)
                replaced = np.where(draws < 0.9, others, ids[chosen])
                ids[chosen] = np.where(draws < 0.8, mask, replaced)
                weights[chosen] = row["weights"][chosen]
            return {**row, "ids": ids, "weights": weights}

        return corrupt, None


@dataclasses.dataclass(frozen=True)
class SpanCorruption:
    """Replaces spans of tokens by sentinels; the target has the spans (Raffel et al., "T5", 2020).

    Kept and replaced spans alternate, and begin with a kept one; both kinds have random lengths of
    one or more. The token that ends a document stays in the source, and ends each target.

    Attributes:
        rate: the share of replaced tokens.
        mean_span: mean length of a replaced span.
        start: the token that starts a target.

    Raises:
        DataError: the rate is not above 0 and below 1, or the mean is below 1.

    Example:
        >>> SpanCorruption().sizes(512)
        (77, 26)
    """

    rate: float = 0.15
    mean_span: float = 3.0
    start: int = 0

    def __post_init__(self) -> None:
        _check_rate(self.rate)
        if not self.mean_span >= 1:
            raise DataError(f"mean_span is {self.mean_span!r}; give 1 or more")

    def sizes(self, number: int) -> tuple[int, int]:
        """Returns the numbers of replaced tokens and of spans among so many tokens."""
        if number < 2:
            return 0, 0
        noise = min(max(round(number * self.rate), 1), number - 1)
        return noise, min(max(round(noise / self.mean_span), 1), number - noise)

    def prepared(
        self, spelling: Spelling | None, vocab_size: int, rows: Sequence[Rows]
    ) -> tuple[Corrupt, int | None]:
        """Returns the function that makes a source and its target of each row, and the positions of
        a target, a multiple of 8 that all targets fit into.

        Raises:
            DataError: the tokenizer has too few sentinels or no token that ends a document, or only
                some tokens of documents count.
        """
        del vocab_size
        sentinels, end = _sentinels(spelling), None if spelling is None else spelling.end
        sizes = [[*map(self.sizes, found)] for each in rows for found in each.piece_sizes()]
        most = max(spans for found in sizes for _, spans in found)
        if spelling is None or end is None or len(sentinels) < most:
            raise DataError(
                f"span corruption needs a tokenizer with the tokens {_SENTINEL.format(0)} to "
                f"{_SENTINEL.format(most - 1)}, and one that ends a document, but it has "
                f"{len(sentinels)} of the first and {'no' if end is None else 'such an'} end; put "
                "its files into the folder of the model, or make rows shorter"
            )
        if any(each.is_weighted for each in rows):
            raise DataError(
                "span corruption takes texts of which each token counts, but a source has prompts "
                "or weights; give texts, or for pairs set CORRUPTION_RATE = 0"
            )
        longest = max(sum(noise + spans + 1 for noise, spans in found) for found in sizes)
        length, ends = -(-longest // 8) * 8, np.array([end])

        def corrupt(row: Row, bits: Any) -> dict[str, np.ndarray]:
            source, target = empty_row(len(row["ids"])), empty_row(length)
            at = {"source": 0, "target": 0}
            for piece in _pieces(row):
                parts = self._split(row["ids"][piece], sentinels, end, bits)
                labels = np.concatenate([parts[1], ends])
                shifted = np.concatenate([[self.start], labels[:-1]])
                for name, side, ids in (("source", source, parts[0]), ("target", target, shifted)):
                    here = slice(at[name], at[name] + len(ids))
                    side["ids"][here], side["real"][here] = ids, 1
                    side["begins"][here.start] = True
                    if name == "target":
                        side["labels"][here], side["weights"][here] = labels, 1
                    at[name] = here.stop
            return target | {f"source_{name}": source[name] for name in ("ids", "begins", "real")}

        return corrupt, length

    def _split(
        self, ids: np.ndarray, sentinels: Sequence[int], end: int, bits: Any
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns source and target of a piece, the target without its end."""
        body = ids[: len(ids) - (ids[-1] == end)]
        noise, spans = self.sizes(len(body))
        source, target, at = [], [], 0
        if spans:
            kept, replaced = (_lengths(n, spans, bits) for n in (len(body) - noise, noise))
            for sentinel, keep, replace in zip(sentinels, kept, replaced, strict=False):
                source += [body[at : at + keep], [sentinel]]
                target += [[sentinel], body[at + keep : at + keep + replace]]
                at += keep + replace
        source.append(ids[at:])
        return np.concatenate(source), np.concatenate([[], *target]).astype(np.int32)


Corruption = MaskedTokens | SpanCorruption


def _check_rate(rate: float) -> None:
    if not 0 < rate < 1:
        raise DataError(f"the rate of a corruption is {rate!r}; give a number above 0 and below 1")


def _pieces(row: Row) -> Iterator[slice]:
    """Yields the place of each piece of a document in a row."""
    number = int(row["real"].sum())
    begins = np.flatnonzero(row["begins"][:number])
    for begin, end in zip(begins, [*begins[1:], number], strict=True):
        yield slice(int(begin), int(end))


def _uniform(bits: Any, number: int) -> np.ndarray:
    """Returns numbers from 0 on and below 1."""
    # Raw bits are the same in all releases of NumPy, other than its distributions.
    return (bits.random_raw(number) >> np.uint64(11)) * 2.0**-53


def _lengths(number: int, parts: int, bits: Any) -> np.ndarray:
    """Cuts a number into so many random parts of one or more; all ways are equally likely."""
    cuts = 1 + np.sort(np.argsort(bits.random_raw(number - 1), kind="stable")[: parts - 1])
    return np.diff([0, *cuts, number])


def _special_id(spelling: Spelling | None, name: str) -> int | None:
    """Returns the id of a special token by name; None if the tokenizer has none."""
    if spelling is None:
        return None
    text = spelling.special.get(name, _SPECIAL[name])
    return None if text is None else _id_of(spelling, text)


def _id_of(spelling: Spelling, text: str) -> int | None:
    ids, _ = spelling.spans(text, False)
    # An unknown text may be one token, too.
    unknown, _ = spelling.spans(f"{text[:-1]}~{text[-1]}", False)
    return ids[0] if len(ids) == 1 and ids != unknown else None


def _sentinels(spelling: Spelling | None) -> list[int]:
    """Returns the ids of the sentinels, in order."""
    found: list[int] = []
    while spelling is not None:
        number = _id_of(spelling, _SENTINEL.format(len(found)))
        if number is None or number in found:
            break
        found.append(number)
    return found
