"""Rows: documents as tokens on disk, packed into rows of one length.

Tokens lie in files without names in the folder for temporary files, so a source may be larger than
memory. Which documents share a row is decided once; then each row can be read by its number.

A document of n tokens has n - 1 positions: the model reads all but the last token, and predicts all
but the first. With a shift of 0 it has n positions, each labelled with its own token. No position
sees another document.
"""

from __future__ import annotations

import array
import bisect
import dataclasses
import tempfile
from collections.abc import Iterable, Iterator
from typing import IO, Any

import numpy as np

from pipemesh.data.documents import Document
from pipemesh.errors import DataError
from pipemesh.text import count_text

PACKINGS = ("auto", "split", "whole", "single")
"""How documents share rows.

* `split`: documents follow each other; at the end of a row a document goes on in the next row, as a
  segment that sees nothing of what came before.
* `whole`: each document lies in one row, with others if they fit; the end of a longer one is cut.
* `single`: each document has a row for itself; the end of a longer one is cut.
* `auto`: `split` for sources in which every token counts, and `whole` for others.
"""


@dataclasses.dataclass(frozen=True)
class Counts:
    """Numbers of a source, of one epoch.

    Attributes:
        source: its path.
        rows: rows.
        documents: documents, with those left out.
        tokens: tokens of all documents.
        predicted: tokens that are predicted, with any weight.
        split: documents that were split at ends of rows.
        cut: documents whose end was cut, without those left out.
        cut_tokens: tokens that were cut from them.
        left_out: documents without a token to predict, or only in the end that would be cut.
        too_long: pairs of which a side is longer than a row, which are left out.
        by_length: lengths of rows in buckets, with the number of rows of each; empty without.
    """

    source: str
    rows: int
    documents: int
    tokens: int
    predicted: int
    split: int
    cut: int
    cut_tokens: int
    left_out: int
    too_long: int = 0
    by_length: tuple[tuple[int, int], ...] = ()

    def __str__(self) -> str:
        told = (
            f"{self.source}: {count_text(self.documents, 'document')}, {self.tokens:,} tokens, "
            f"{self.predicted:,} of them predicted, in {count_text(self.rows, 'row')}"
        )
        if self.by_length:
            rows = (f"{number:,} of {length:,} tokens" for length, number in self.by_length)
            told += f" ({', '.join(rows)})"
        if self.split:
            told += f"; split at ends of rows: {self.split:,}"
        if self.cut:
            told += f"; longer than a row and cut: {self.cut:,}, by {self.cut_tokens:,} tokens"
        if self.left_out:
            told += f"; without a token to predict in a row and left out: {self.left_out:,}"
        if self.too_long:
            told += f"; longer than a row and left out: {self.too_long:,}"
        return told


class Tokens:
    """The documents of a source, on disk.

    Attributes:
        starts: int64 [documents + 1], where each document starts.
        ids: int32 [tokens].
        weights: float32 [tokens]; None if all are 1.
        first: int64 [documents], how many positions of each document reach the first token that
            counts; more than there are if there is none.
        sources: int64 [documents], the number of tokens at the start of each that an encoder reads.
    """

    def __init__(self, documents: Iterable[Document], shift: int = 1) -> None:
        self.shift = shift
        try:
            # They have no names, so nothing is left behind.
            with tempfile.TemporaryFile() as ids, tempfile.TemporaryFile() as weights:
                self._write(documents, ids, weights)
        except OSError as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"tokens cannot be written to {tempfile.gettempdir()!r} ({error.strerror}); make "
                "room, or name another folder by TMPDIR"
            ) from error

    def _write(self, documents: Iterable[Document], ids: IO[bytes], weights: IO[bytes]) -> None:
        lengths, first, sources = array.array("q"), array.array("q"), array.array("q")
        is_weighted = False
        for document in documents:
            number = len(document.ids)
            counts = document.weights
            if counts is None:
                counts = np.ones([number], np.float32)
            counted = np.flatnonzero(counts[self.shift :])
            first.append(int(counted[0]) + 1 if len(counted) else number + 1)
            lengths.append(number)
            sources.append(document.source)
            is_weighted = is_weighted or not (counts == 1).all()
            ids.write(document.ids.astype(np.int32).tobytes())
            weights.write(counts.astype(np.float32).tobytes())
        self.starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.first, self.sources = np.array(first), np.array(sources)
        self.ids = _mapped(ids, np.int32)
        self.weights = _mapped(weights, np.float32) if is_weighted else None


def _mapped(file: IO[bytes], dtype: Any) -> np.ndarray:
    file.flush()
    # An empty file cannot be mapped.
    return np.memmap(file, dtype, "r") if file.tell() else np.zeros([0], dtype)


class Rows:
    """The rows of a source.

    Args:
        source: the path, for messages.
        tokens: its documents.
        length: number of positions in a row.
        packing: one of `PACKINGS`.

    Attributes:
        counts: numbers of documents, rows, and what was cut.
        sizes: int64 [rows]: of each row the number of positions that are used; None if documents
            are split at ends of rows.

    Raises:
        DataError: there is nothing to predict.
    """

    def __init__(self, source: str, tokens: Tokens, length: int, packing: str) -> None:
        self._tokens, self._length = tokens, length
        if packing == "auto":
            packing = "split" if tokens.weights is None else "whole"
        self._is_split = packing == "split"
        self._shift = tokens.shift
        self.sizes: np.ndarray | None = None
        sizes = np.maximum(np.diff(tokens.starts) - self._shift, 0)
        last = sizes if self._is_split else np.minimum(sizes, length)
        # A document of which nothing counts takes no place.
        used = np.flatnonzero((tokens.first <= last) & (last > 0))
        self._documents, fitting = used, last[used]
        if self._is_split:
            self._ends = np.cumsum(fitting)
            total = int(self._ends[-1]) if len(used) else 0
            number = -(-total // length)
            begins = self._ends - fitting
            split = int(np.count_nonzero(begins // length != (self._ends - 1) // length))
        else:
            row_of = _best_fit(fitting, length) if packing == "whole" else np.arange(len(used))
            order = np.argsort(row_of, kind="stable")
            self._documents = used[order]
            number, split = int(row_of.max(initial=-1)) + 1, 0
            self.sizes = np.bincount(row_of, fitting, number).astype(np.int64)
            self._first = np.searchsorted(row_of[order], np.arange(number + 1))
        if not number:
            if not len(sizes):
                raise DataError(f"data {source!r} has no document; give a file with some")
            raise DataError(
                f"data {source!r} has no document with a token to predict in rows of {length} "
                "tokens; give longer documents, or longer rows"
            )
        cut = (sizes - last)[used]
        self.counts = Counts(
            source=source,
            rows=number,
            documents=len(sizes),
            tokens=int(tokens.starts[-1]),
            predicted=self._predicted(used, last),
            split=split,
            cut=int(np.count_nonzero(cut)),
            cut_tokens=int(cut.sum()),
            left_out=len(sizes) - len(used),
        )

    def __len__(self) -> int:
        return self.counts.rows

    def _predicted(self, used: np.ndarray, last: np.ndarray) -> int:
        weights, starts = self._tokens.weights, self._tokens.starts
        if weights is None:
            return int(last[used].sum())
        return sum(
            int(np.count_nonzero(weights[starts[d] + self._shift :][: last[d]])) for d in used
        )

    @property
    def is_weighted(self) -> bool:
        """Returns whether not all tokens count alike."""
        return self._tokens.weights is not None

    def piece_sizes(self) -> Iterator[list[int]]:
        """Yields the sizes of the pieces of documents in each row."""
        for row in range(len(self)):
            yield [number for _, _, number in self._pieces(row)]

    def _pieces(self, row: int) -> Iterator[tuple[int, int, int]]:
        """Yields the documents of a row, with the first of their positions and the number."""
        if not self._is_split:
            for document in self._documents[self._first[row] : self._first[row + 1]]:
                size = int(self._tokens.starts[document + 1] - self._tokens.starts[document])
                yield int(document), 0, min(size - self._shift, self._length)
            return
        at, end = row * self._length, min((row + 1) * self._length, int(self._ends[-1]))
        index = int(np.searchsorted(self._ends, at, side="right"))
        while at < end:
            begin = int(self._ends[index - 1]) if index else 0
            number = min(int(self._ends[index]), end) - at
            yield int(self._documents[index]), at - begin, number
            at, index = at + number, index + 1

    def read(self, row: int) -> dict[str, np.ndarray]:
        """Returns `ids`, `labels`, `weights`, `begins` and `real` of a row, as
        `packing.batch_of` takes them.
        """
        tokens, found, at = self._tokens, empty_row(self._length), 0
        for document, first, number in self._pieces(row):
            here, begin = slice(at, at + number), int(tokens.starts[document]) + first
            after = slice(begin + self._shift, begin + self._shift + number)
            found["ids"][here] = tokens.ids[begin : begin + number]
            found["labels"][here] = tokens.ids[after]
            found["weights"][here] = 1 if tokens.weights is None else tokens.weights[after]
            found["begins"][at] = True
            found["real"][here] = 1
            at += number
        return found


def empty_row(length: int) -> dict[str, np.ndarray]:
    """Returns a row of padding."""
    return {
        "ids": np.zeros([length], np.int32),
        "labels": np.zeros([length], np.int32),
        "weights": np.zeros([length], np.float32),
        "begins": np.zeros([length], np.bool_),
        "real": np.zeros([length], np.int32),
    }


class PairRows:
    """The rows of a source of pairs: each has whole sources, and their targets.

    Args:
        source: the path, for messages.
        tokens: its documents.
        lengths: number of positions in a row of sources, and in one of targets.
        packing: `whole` or `auto`, or `single`.

    Attributes:
        counts: numbers of pairs and rows.
        sizes: int64 [rows]: of each row the number of positions that are used by sources or
            targets, whichever is larger.

    Raises:
        DataError: no pair fits into a row, or pairs are to be split.
    """

    def __init__(self, source: str, tokens: Tokens, lengths: tuple[int, int], packing: str) -> None:
        self._tokens, self._lengths = tokens, lengths
        if packing == "split":
            raise DataError("packing='split': pairs are not split at ends of rows; set 'whole'")
        targets = np.diff(tokens.starts) - tokens.sources - 1
        sizes = np.stack([tokens.sources, targets], 1)
        used = np.flatnonzero((sizes <= lengths).all(1) & (targets > 0))
        if not len(used):
            raise DataError(
                f"data {source!r} has no pair that fits into rows of {lengths[0]} and {lengths[1]} "
                "tokens; give a file with some, or longer rows"
            )
        row_of = np.arange(len(used))
        if packing != "single":
            row_of = _first_fit(sizes[used], np.array(lengths))
        order = np.argsort(row_of, kind="stable")
        self._pairs, number = used[order], int(row_of.max()) + 1
        self._first = np.searchsorted(row_of[order], np.arange(number + 1))
        sides = [np.bincount(row_of, side, number) for side in sizes[used].T]
        self.sizes = np.max(sides, axis=0).astype(np.int64)
        self.counts = Counts(
            source=source,
            rows=number,
            documents=len(sizes),
            tokens=int(tokens.starts[-1]),
            predicted=int(targets[used].sum()),
            split=0,
            cut=0,
            cut_tokens=0,
            left_out=int((targets <= 0).sum()),
            too_long=int((sizes > lengths).any(1).sum()),
        )

    def __len__(self) -> int:
        return self.counts.rows

    def read(self, row: int) -> dict[str, np.ndarray]:
        """Returns of the targets of a row what `Rows.read` does, and of the sources `source_ids`,
        `source_begins` and `source_real`.
        """
        tokens, (source, target) = self._tokens, map(empty_row, self._lengths)
        at, source_at = 0, 0
        for pair in self._pairs[self._first[row] : self._first[row + 1]]:
            begin, end = tokens.starts[pair : pair + 2]
            middle = begin + tokens.sources[pair]
            here = slice(source_at, source_at + int(middle - begin))
            source["ids"][here], source["real"][here] = tokens.ids[begin:middle], 1
            source["begins"][source_at] = True
            here = slice(at, at + int(end - middle) - 1)
            target["ids"][here] = tokens.ids[middle : end - 1]
            target["labels"][here] = tokens.ids[middle + 1 : end]
            target["weights"][here], target["real"][here] = 1, 1
            target["begins"][at] = True
            source_at, at = source_at + int(middle - begin), here.stop
        return target | {f"source_{name}": source[name] for name in ("ids", "begins", "real")}


# Rows that a pair may still join; the fullest of more is closed.
_OPEN_ROWS = 1024


def _first_fit(sizes: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Returns the row of each pair, the first one that has room for both sides; the longest pairs
    come first.
    """
    rows, number = np.zeros([len(sizes)], np.int64), _OPEN_ROWS
    names, rooms = np.arange(number), np.tile(lengths, [number, 1])
    for pair in np.argsort(-sizes.sum(1), kind="stable"):
        has_room = np.all(rooms >= sizes[pair], axis=1)
        at = int(has_room.argmax())
        if not has_room[at]:
            at = int(rooms.sum(1).argmin())
            names[at], rooms[at], number = number, lengths, number + 1
        rows[pair] = names[at]
        rooms[at] -= sizes[pair]
    return np.unique(rows, return_inverse=True)[1]


def _best_fit(sizes: np.ndarray, length: int) -> np.ndarray:
    """Returns the row of each document: the fullest one that has room, for the longest first.

    Rows are numbered in the order of their first documents. See Ding et al., 2024, "Fewer
    truncations improve language modeling".
    """
    rows = np.zeros([len(sizes)], np.int64)
    # Rows by the room that they have, and these rooms in ascending order.
    open_rows: dict[int, list[int]] = {}
    rooms: list[int] = []
    number = 0
    for document in np.argsort(-sizes, kind="stable"):
        size = int(sizes[document])
        at = bisect.bisect_left(rooms, size)
        if at < len(rooms):
            room = rooms[at]
            row = open_rows[room].pop()
            if not open_rows[room]:
                del open_rows[room], rooms[at]
        else:
            room, row = length, number
            number += 1
        rows[document] = row
        if left := room - size:
            if left not in open_rows:
                bisect.insort(rooms, left)
            open_rows.setdefault(left, []).append(row)
    _, first, inverse = np.unique(rows, return_index=True, return_inverse=True)
    rank = np.empty_like(first)
    rank[np.argsort(first, kind="stable")] = np.arange(len(first))
    return rank[inverse]
