"""Mixtures: rows of several sources, each a function of the seed and the number of the row.

Nothing is remembered from row to row, so training resumes exactly from the number of a step, under
any plan and with any number of processes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import numpy as np
import tensorflow as tf

from pipemesh.backend.dataset_functions import numpy_call
from pipemesh.data import packing
from pipemesh.data.corruption import Corrupt, Corruption, SpanCorruption
from pipemesh.data.documents import Spelling, documents_of
from pipemesh.data.rows import PACKINGS, Counts, PairRows, Rows, Tokens
from pipemesh.data.sources import Source, absolute, digest_of, parse_sources
from pipemesh.errors import DataError
from pipemesh.text import nearest_text

# Rows whose sources are chosen together.
_BLOCK = 1 << 16
# Different numbers are drawn for each of these.
_CHOICES, _ORDERS, _CORRUPTIONS = 0, 1, 1 << 32
# What rows have, by name.
_DTYPES = {
    "ids": tf.int32,
    "labels": tf.int32,
    "weights": tf.float32,
    "begins": tf.bool,
    "real": tf.int32,
}
# What sources have besides.
_OF_SOURCE = ("ids", "begins", "real")


class Mixture:
    """An endless sequence of rows.

    Each row is of a source chosen at random by the weights. Each source gives all its rows once in
    an epoch, in an order that is a function of the seed and the epoch.

    Args:
        rows: the rows of each source.
        weights: the weights of the sources.
        seed: a seed.
        corrupt: corrupts rows; None for no corruption.
        part: tells mixtures apart that have the same seed.
    """

    def __init__(
        self,
        rows: Sequence[Any],
        weights: Sequence[float],
        seed: int,
        corrupt: Corrupt | None = None,
        part: int = 0,
    ) -> None:
        self._rows, self._seed, self._corrupt = rows, (seed % (1 << 64), part), corrupt
        self._shares = np.cumsum(weights)[:-1] / np.sum(weights)
        # Rows of each source before each block.
        self._before = [np.zeros([len(rows)], np.int64)]
        self._order = functools.lru_cache(2 * len(rows))(self._new_order)
        self._choice = functools.lru_cache(2)(self._new_choice)

    def place(self, row: int) -> tuple[int, int, int]:
        """Returns the source of a row, the epoch there, and the number of its row there."""
        block, within = divmod(row, _BLOCK)
        while len(self._before) <= block:
            counts = np.bincount(self._choice(len(self._before) - 1), minlength=len(self._rows))
            self._before.append(self._before[-1] + counts)
        choice = self._choice(block)
        source = int(choice[within])
        before = self._before[block][source] + np.count_nonzero(choice[:within] == source)
        epoch, number = divmod(int(before), len(self._rows[source]))
        return source, epoch, int(self._order(source, epoch)[number])

    def batch(self, step: int, size: int) -> dict[str, np.ndarray]:
        """Returns the rows of a batch, as in `Rows.read`."""
        found: list[Any] = []
        for row in range(step * size, (step + 1) * size):
            source, _, number = self.place(row)
            found.append(self._rows[source].read(number))
            if self._corrupt is not None:
                bits = _bits(self._seed, row, _CORRUPTIONS)
                found[-1] = self._corrupt(found[-1], bits)
        return {name: np.stack([each[name] for each in found]) for name in found[0]}

    def _draws(self, kind: int, number: int, count: int) -> np.ndarray:
        # Raw bits are the same in all releases of NumPy, other than its distributions.
        return _bits(self._seed, number, kind).random_raw(count)

    def _new_choice(self, block: int) -> np.ndarray:
        drawn = (self._draws(_CHOICES, block, _BLOCK) >> np.uint64(11)) * 2.0**-53
        return np.searchsorted(self._shares, drawn, side="right")

    def _new_order(self, source: int, epoch: int) -> np.ndarray:
        keys = self._draws(_ORDERS + source, epoch, len(self._rows[source]))
        return np.argsort(keys, kind="stable")


def _bits(seed: tuple[int, int], number: int, kind: int) -> np.random.Philox:
    counter, key = (np.array(words, np.uint64) for words in ([0, 0, number, kind], seed))
    return np.random.Philox(counter=counter, key=key)


class _Bucket:
    """The rows of a source that fit into a length, cut to it."""

    def __init__(self, rows: Rows | PairRows, numbers: np.ndarray, length: int) -> None:
        self._rows, self._numbers, self._length = rows, numbers, length

    def __len__(self) -> int:
        return len(self._numbers)

    def read(self, number: int) -> dict[str, np.ndarray]:
        """Returns a row, as `Rows.read`."""
        found = self._rows.read(int(self._numbers[number]))
        return {name: values[: self._length] for name, values in found.items()}


class BucketMixture:
    """An endless sequence of batches, each of rows of one length.

    The length of a batch is chosen at random, by the share of rows that need it. The rows of a
    length are a `Mixture` of their own. So a batch is a function of the seed and its number.

    Args:
        rows: the rows of each source.
        weights: the weights of the sources.
        seed: a seed.
        lengths: the lengths, in ascending order; a row has the first one into which it fits.
        corrupt: corrupts rows; None for no corruption.
    """

    def __init__(
        self,
        rows: Sequence[Rows | PairRows],
        weights: Sequence[float],
        seed: int,
        lengths: Sequence[int],
        corrupt: Corrupt | None = None,
    ) -> None:
        of_length = [_numbers_by_length(each, lengths) for each in rows]
        shares = list[float]()
        self._mixtures: list[Mixture] = []
        for part, length in enumerate(lengths):
            buckets = [
                _Bucket(each, numbers[part], length)
                for each, numbers in zip(rows, of_length, strict=True)
            ]
            parts = [
                weight * len(bucket) / len(each)
                for weight, bucket, each in zip(weights, buckets, rows, strict=True)
            ]
            if any(parts):
                shares.append(sum(parts))
                self._mixtures.append(Mixture(buckets, parts, seed, corrupt, part + 1))
        # Each choice is a source of one row, so its epoch is the number of the batch there.
        self._choice = Mixture([range(1)] * len(shares), shares, seed)

    def batch(self, step: int, size: int) -> dict[str, np.ndarray]:
        """Returns the rows of a batch, as in `Rows.read`."""
        part, number, _ = self._choice.place(step)
        return self._mixtures[part].batch(number, size)


def _numbers_by_length(rows: Rows | PairRows, lengths: Sequence[int]) -> list[np.ndarray]:
    """Returns for each length the numbers of the rows that need it; raises DataError if rows have
    none.
    """
    if rows.sizes is None:
        raise DataError(
            f"data {rows.counts.source!r} has rows of one length, since its documents are split at "
            "ends of rows; buckets need packing='whole' or 'single' (--packing)"
        )
    part = np.searchsorted(lengths, rows.sizes)
    return [np.flatnonzero(part == number) for number in range(len(lengths))]


@dataclasses.dataclass(frozen=True)
class DocumentBatches:
    """A function that returns a dataset of batches of packed documents.

    Batches are dicts of `ids`, `labels`, `weights`, `segment_ids` and `segment_pos`, each
    [batch_size, length]. With a seed they go on without end, in a mixture of the sources by their
    weights; row n is a function of the seed and n, so a saved iterator is the number of the next
    batch. Without one the dataset has all rows once, in order; its last batch may be smaller.

    All documents are read once, when the dataset or the counts are first needed, and kept as tokens
    in temporary files. Before that no file is opened.

    With a `source_length`, documents are pairs of a prompt and its completion, for a model that
    reads one and predicts the other. Then batches have `source_ids`, `source_segment_ids` and
    `source_segment_pos`, too, each [batch_size, source_length]; segment n of a row's source belongs
    to segment n of its target. Longer pairs are left out and counted.

    With a `corruption`, the model restores tokens. Row n is then also corrupted as a function of
    the seed and n, and every row of a dataset in order always in the same way. Of `SpanCorruption`
    batches have a source, too, as long as a row, and the target is as long as its data needs.

    Attributes:
        sources: files of documents, as `parse_sources` reads them; or a function that returns their
            list, called when it is first needed.
        spelling: a function that returns the tokenizer, or None, and the number of tokens of the
            model; it must be hashable. If it has an attribute `digests`, a dict of texts, these
            change when the tokenizer does.
        length: number of positions in a row.
        batch_size: number of rows in a batch.
        packing: how documents share rows: `split`, `whole`, `single` or `auto`.
        seed: seed of mixture and order; None for all rows in order.
        source_length: number of positions in a row of sources; None for documents that are no
            pairs.
        corruption: `MaskedTokens` or `SpanCorruption`; None to predict what follows.
        buckets: lengths of rows besides the longest, such as `128,256`; "" for none. All rows of a
            batch of a mixture then have the shortest of these lengths into which they fit. Rows in
            order, as of held-out data, have one length.

    Raises:
        DataError: there is no such packing, or the buckets are not shorter than a row.

    Example:
        >>> import os, tempfile
        >>> path = os.path.join(tempfile.mkdtemp(), "a.jsonl")
        >>> with open(path, "w") as file:
        ...     _ = file.write('{"ids": [5, 6, 7]}\\n{"ids": [8, 9]}')
        >>> batches = DocumentBatches(path, lambda: (None, 10), 4, batch_size=1)
        >>> (batch,) = batches()
        >>> batch["ids"].numpy().tolist(), batch["segment_ids"].numpy().tolist()
        ([[5, 6, 8, 0]], [[1, 1, 2, 0]])
        >>> print(batches.counts()[0].predicted)
        3
    """

    sources: str | Callable[[], str] = dataclasses.field(repr=False)
    spelling: Callable[[], tuple[Spelling | None, int]] = dataclasses.field(repr=False)
    length: int
    batch_size: int
    packing: str = "auto"
    seed: int | None = None
    # Notes of checkpoints have it among the digests.
    source_length: int | None = dataclasses.field(default=None, repr=False)
    corruption: Corruption | None = dataclasses.field(default=None, repr=False)
    buckets: str = dataclasses.field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.packing not in PACKINGS:
            near = nearest_text(self.packing, PACKINGS)
            raise DataError(f"packing is {self.packing!r}{near}")
        if self.source_length is not None and self.corruption is not None:
            raise DataError("pairs are not corrupted; give source_length or corruption")
        if self._shorter() and isinstance(self.corruption, SpanCorruption):
            raise DataError(
                "rows of spans have one length, that of their targets; leave buckets out"
            )

    def __deepcopy__(self, _: Any) -> DocumentBatches:
        # Copies of params have the digests of the files that were read.
        return self

    def __call__(self) -> tf.data.Dataset:
        """Returns the dataset; raises DataError if the documents cannot be read."""
        (_, lengths), read = self._prepared(), _Reader(self)
        if self.seed is None:
            one_by_one = tf.data.Dataset.range(sum(map(len, self._rows())))
            rows = one_by_one.map(_packed(read, 1, *lengths)).unbatch()
            return rows.batch(self.batch_size)
        packed = _packed(read, self.batch_size, *lengths, has_buckets=bool(self.buckets))
        return tf.data.Dataset.counter().map(packed)

    def _reader(self) -> Callable[[int], dict[str, np.ndarray]]:
        """Returns a function from the number of a batch of a mixture, or of one of all rows in
        order, to its rows, as in `Rows.read`; raises DataError as a call.
        """
        rows, (corrupt, _) = self._rows(), self._prepared()
        if self.seed is None:
            return functools.partial(_row_in_order, rows, corrupt)
        weights = [source.weight for source in self._parsed]
        if self.buckets:
            mixture = BucketMixture(rows, weights, self.seed, self.row_lengths(), corrupt)
        else:
            mixture = Mixture(rows, weights, self.seed, corrupt)
        return functools.partial(mixture.batch, size=self.batch_size)

    def _elsewhere(self) -> DocumentBatches:
        """Returns the same batches for another process, which reads its own files."""
        found = dataclasses.replace(self)
        # Paths are relative to the folder of this process.
        found.__dict__["_parsed"] = tuple(map(absolute, self._parsed))
        return found

    def row_lengths(self) -> list[int]:
        """Returns the lengths of rows that batches may have, in ascending order."""
        return [*self._shorter(), self._longest]

    @property
    def _longest(self) -> int:
        return max(self.length, self.source_length or 0)

    def _shorter(self) -> list[int]:
        try:
            found = sorted({int(part) for part in self.buckets.split(",") if self.buckets})
        except (ValueError, AttributeError):
            found = [0]
        if any(not 2 <= length < self._longest for length in found):
            raise DataError(
                f"buckets={self.buckets!r}: they are lengths from 2 on that are shorter than a row "
                f"of {self._longest} tokens (--sequence_length); give a text such as '128,256'"
            )
        return found

    def batch_specs(self) -> list[dict[str, tf.TensorSpec]]:
        """Returns the shapes and dtypes of batches of a mixture, for each length that rows have."""
        whole = cast("dict[str, tf.TensorSpec]", self().element_spec)

        def of(length: int, name: str) -> tf.TensorSpec:
            most = self.source_length if name.startswith("source_") else self.length
            return tf.TensorSpec([self.batch_size, min(length, most or length)], whole[name].dtype)

        used = {length for each in self.counts() for length, rows in each.by_length if rows}
        return [{name: of(length, name) for name in whole} for length in sorted(used)]

    def row_tokens(self) -> int:
        """Returns the number of positions in a row, of its source and its target; raises DataError
        if that depends on documents that cannot be read.
        """
        return sum(filter(None, self._prepared()[1]))

    def _prepared(self) -> tuple[Corrupt | None, tuple[int, int | None]]:
        """Returns the function that corrupts rows, and the lengths of a target and of a source."""
        if self.corruption is None:
            return None, (self.length, self.source_length)
        rows = cast("list[Rows]", self._rows())
        corrupt, length = self.corruption.prepared(*self.spelling(), rows)
        return corrupt, (self.length, None) if length is None else (length, self.length)

    def counts(self) -> list[Counts]:
        """Returns the numbers of documents, tokens and rows of each source."""
        rows = self._rows()
        if not self.buckets or self.seed is None:
            return [each.counts for each in rows]
        lengths = self.row_lengths()
        numbers = [map(len, _numbers_by_length(each, lengths)) for each in rows]
        return [
            dataclasses.replace(each.counts, by_length=tuple(zip(lengths, of_each, strict=True)))
            for each, of_each in zip(rows, numbers, strict=True)
        ]

    @functools.cached_property
    def digests(self) -> dict[str, str]:
        """Returns by name what changes when the documents do: each source with a digest of its
        files, and digests of the tokenizer, as they were when they were first needed.
        """
        found = {
            f"source {number}": f"{source}, files {digest}"
            for number, (source, digest) in enumerate(
                zip(self._parsed, self._files, strict=True), 1
            )
        }
        if self.source_length is not None:
            found["source_length"] = str(self.source_length)
        if self.corruption is not None:
            found["corruption"] = str(self.corruption)
        if self.buckets:
            found["buckets"] = ",".join(map(str, self._shorter()))
        return found | getattr(self.spelling, "digests", {})

    @functools.cached_property
    def _files(self) -> list[str]:
        """Returns the digest of each source's files, as they were when they were first needed."""
        return [digest_of(source) for source in self._parsed]

    @functools.cached_property
    def _parsed(self) -> tuple[Source, ...]:
        return parse_sources(self.sources if isinstance(self.sources, str) else self.sources())

    def _rows(self) -> Sequence[Rows | PairRows]:
        digests = tuple(self.digests.items())
        lengths = self.length, self.source_length
        shift = 0 if self.corruption else 1
        return _rows_of(self._parsed, self.spelling, lengths, shift, self.packing, digests)


# Training, held-out data and forecasts read the same documents.
@functools.lru_cache(4)
def _rows_of(
    sources: tuple[Source, ...],
    spelling: Any,
    lengths: tuple[int, int | None],
    shift: int,
    packing: str,
    _digests: Any,
) -> Sequence[Rows | PairRows]:
    (tokenizer, vocab_size), (length, source_length) = spelling(), lengths

    def rows(source: Source) -> Rows | PairRows:
        pairs = source_length is not None
        tokens = Tokens(documents_of(source, tokenizer, vocab_size, pairs), shift)
        if source_length is None:
            return Rows(source.path, tokens, length, packing)
        return PairRows(source.path, tokens, (source_length, length), packing)

    return [rows(source) for source in sources]


class _Reader:
    """A function from the number of a batch to its arrays, in this process or in another one."""

    def __init__(self, documents: DocumentBatches) -> None:
        self._documents, self._read = documents, documents._reader()

    def __reduce__(self) -> Any:
        documents = self._documents
        digests = {**getattr(documents.spelling, "digests", {})}
        return _reader_there, (documents._elsewhere(), documents._files, digests)

    def __call__(self, number: np.int64) -> list[np.ndarray]:
        return list(self._read(int(number)).values())


def _reader_there(
    documents: DocumentBatches, files: Sequence[str], spelling: Mapping[str, str]
) -> _Reader:
    """Returns the reader of another process; raises DataError if its files differ here."""
    for source, digest, there in zip(documents._parsed, documents._files, files, strict=True):
        if digest != there:
            raise DataError(
                f"data {source.path!r} differs from where training was started; put the same files "
                "there"
            )
    for name, digest in getattr(documents.spelling, "digests", {}).items():
        if digest != spelling.get(name):
            raise DataError(
                f"{name} differs from where training was started; put the same tokenizer there"
            )
    return _Reader(documents)


def _row_in_order(
    rows: Sequence[Any], corrupt: Corrupt | None, number: int
) -> dict[str, np.ndarray]:
    """Returns a row of all rows of all sources, in order, as a batch."""
    ends = np.cumsum([len(each) for each in rows])
    source = int(np.searchsorted(ends, number, side="right"))
    found = rows[source].read(int(number - ends[source]) + len(rows[source]))
    if corrupt is not None:
        found = corrupt(found, _bits((0, 0), number, _CORRUPTIONS))
    return {name: values[np.newaxis] for name, values in found.items()}


def _packed(
    read: Any, batch_size: int, length: int, source_length: int | None, has_buckets: bool = False
) -> Any:
    """Returns a function from a number to a batch, whose rows are as long as `read` makes them if
    there are buckets.
    """
    dtypes = list(_DTYPES.values())
    if source_length is not None:
        dtypes += [_DTYPES[name] for name in _OF_SOURCE]

    @tf.autograph.experimental.do_not_convert
    def batch(number: tf.Tensor) -> Mapping[str, tf.Tensor]:
        found = numpy_call(read, [number], dtypes)
        own, source = found[: len(_DTYPES)], found[len(_DTYPES) :]
        shape = [batch_size, None if has_buckets else length]
        shaped = [tf.ensure_shape(tensor, shape) for tensor in own]
        batch = packing.batch_of(**dict(zip(_DTYPES, shaped, strict=True)))
        if source:
            shape = [batch_size, None if has_buckets else source_length]
            shaped = [tf.ensure_shape(tensor, shape) for tensor in source]
            of_source = packing.placed(**dict(zip(_OF_SOURCE, shaped, strict=True)))
            batch |= {f"source_{name}": tensor for name, tensor in of_source.items()}
        return batch

    return batch
