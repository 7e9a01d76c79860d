"""The input: batches of packed rows, read from a corpus through `tf.data`.

The order of the training data is a pure function of the seed. Every epoch visits the files in
another order, reads several at a time, and shuffles the lines in blocks. The key of a block is made
of seed, epoch and block. There is no random state, so a saved iterator is a position and the lines
that it holds. An iterator restored in another process continues with the next batch:

    iterator = iter(train_dataset(corpus, vocabulary, batch_size=8, sequence_length=128, seed=1))
    checkpoint = tf.train.Checkpoint(iterator=iterator)

Restore it into an iterator that was built with the same arguments.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable

import numpy as np
import tensorflow as tf

from pipemesh.backend.dataset_functions import load_library, numpy_call
from pipemesh.data import packing
from pipemesh.errors import PipemeshError, needed

from .corpus import (
    BYTE_ORDER_MARK,
    SPACE_MARK,
    WHITESPACE,
    Corpus,
    Sentences,
    TextFiles,
)
from .vocabulary import Vocabulary

_random = tf.random.experimental  # pyright: ignore[reportAttributeAccessIssue]

# Lines that are shuffled together; a saved iterator holds at most these.
BLOCK_LINES = 4096
# Files that are read in turn, line by line.
_FILES_AT_ONCE = 16
# Bytes of a file that are read at once.
_BUFFER = 1 << 18
# Lines that are tokenized in one call.
_GROUP_LINES = 64
# Prefetched batches; a saved iterator holds them, including an error among them.
PREFETCHED_BATCHES = 2
_BLANKS = rf"\A\r*{BYTE_ORDER_MARK}[{WHITESPACE}\r]*|\A[{WHITESPACE}\r]+|\r|[{WHITESPACE}\r]+\z"


class InputError(PipemeshError, ValueError):
    """A dataset with invalid sizes or without text."""


def train_dataset(
    corpus: Corpus,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    num_shards: int = 1,
    shard: int = 0,
    first_epoch: int = 0,
) -> tf.data.Dataset:
    """Returns training batches without end, in a new order each epoch, without padding.

    Batches are as in `packing.pack`, with `batch_size` rows of `sequence_length` positions. Equal
    seeds give equal batches. With `num_shards` readers each reads the whole text, and `shard` takes
    its part of the rows of one large batch. It raises InputError for invalid sizes or without text,
    CorpusError if the text cannot be read.
    """
    _check_sizes(batch_size, sequence_length)
    if not 0 <= shard < num_shards:
        raise InputError(f"shard {shard} of {num_shards} shards; shards count from 0")
    if not any(True for _ in corpus.train):
        # A text without sentences would be searched forever.
        raise InputError(f"{corpus.name} has no text to train on")

    lines_of = _shuffled_lines(corpus.train)

    # AutoGraph would take longer to convert these functions than TensorFlow to run them.
    @tf.autograph.experimental.do_not_convert
    def epoch_lines(epoch: tf.Tensor) -> tf.data.Dataset:
        key = _random.stateless_fold_in(tf.constant([seed, 0], tf.int64), epoch)
        lines = lines_of(key).batch(BLOCK_LINES)

        @tf.autograph.experimental.do_not_convert
        def shuffle(block: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
            block_key = _random.stateless_fold_in(key, block + 1)
            return _random.stateless_shuffle(lines, block_key)

        return lines.enumerate().map(shuffle)

    blocks = tf.data.Dataset.counter(first_epoch).flat_map(epoch_lines)
    batches = _rows(blocks, vocabulary, num_shards * batch_size, sequence_length)
    if num_shards > 1:
        mine = slice(shard * batch_size, (shard + 1) * batch_size)
        batches = batches.map(lambda batch: {name: rows[mine] for name, rows in batch.items()})
    return _ahead(batches)


def heldout_dataset(
    corpus: Corpus,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    sequence_length: int,
) -> tf.data.Dataset:
    """Returns batches of the held-out text, once and in order, as in `packing.pack`.

    The last batch is padded to `batch_size` rows. It raises InputError for invalid sizes,
    CorpusError if the text cannot be read.
    """
    _check_sizes(batch_size, sequence_length)
    blocks = _lines(corpus.heldout).batch(_GROUP_LINES)
    return _ahead(_rows(blocks, vocabulary, batch_size, sequence_length))


@tf.autograph.experimental.do_not_convert
def sentences(lines: tf.Tensor) -> tf.Tensor:
    """Does the same as `corpus.clean` for lines in a string tensor, and drops empty ones."""
    lines = tf.strings.unicode_transcode(
        lines, "UTF-8", "UTF-8", errors="replace", replace_control_characters=False
    )
    lines = tf.strings.regex_replace(lines, SPACE_MARK, " ")
    lines = tf.strings.regex_replace(lines, _BLANKS, "")
    return tf.boolean_mask(lines, tf.not_equal(lines, ""))


def tokenizer(vocabulary: Vocabulary) -> Callable[[tf.Tensor], tf.RaggedTensor]:
    """Returns `vocabulary.encode` as a TensorFlow function: string [n] -> int32 [n, (pieces)]."""
    # Here, because its libraries take 115 MiB of memory.
    text = needed("tensorflow_text", "the tokenizer", "examples", "tensorflow-text")
    load_library(text.__name__)
    return text.SentencepieceTokenizer(model=vocabulary.model, out_type=tf.int32).tokenize


def _rows(
    blocks: tf.data.Dataset, vocabulary: Vocabulary, batch_size: int, sequence_length: int
) -> tf.data.Dataset:
    stream = packing.token_stream(
        blocks.rebatch(_GROUP_LINES).map(sentences),
        tokenizer(vocabulary),
        vocabulary.bos_id,
        vocabulary.eos_id,
    )
    return packing.pack(
        stream,
        batch_size=batch_size,
        sequence_length=sequence_length,
        bos_id=vocabulary.bos_id,
    )


def _ahead(batches: tf.data.Dataset) -> tf.data.Dataset:
    """Prefetches a few batches.

    One thread is fast enough to feed the devices; the other cores are for the devices.
    `deterministic` stays unset: every step is sequential, so it has no effect, and lingvo sets it
    and warns if it is set.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return batches.prefetch(PREFETCHED_BATCHES).with_options(options)


def _lines(text: Sentences | TextFiles) -> tf.data.Dataset:
    if isinstance(text, Sentences):
        return tf.data.Dataset.from_tensor_slices(tf.constant(text.lines, tf.string))
    return tf.data.Dataset.range(len(text.paths)).flat_map(_reader(text))


def _reader(text: TextFiles) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Returns a function that reads the lines of the file with a number.

    A saved iterator holds the number instead of a path, because files may be elsewhere when it is
    restored. A file is checked for changes before it is opened, and again after its last line,
    unless the first read covered all of it.
    """
    is_long = np.array([size > _BUFFER for size in text.sizes()], np.int64)

    @tf.autograph.experimental.do_not_convert
    def files(most: int, number: tf.Tensor) -> tf.data.Dataset:
        (found,) = numpy_call(functools.partial(_readable, text, most), [number], [tf.string])
        return tf.data.TextLineDataset(tf.ensure_shape(found, [None]), buffer_size=_BUFFER)

    @tf.autograph.experimental.do_not_convert
    def read(number: tf.Tensor) -> tf.data.Dataset:
        lines = files(1, number)
        if not is_long.any():
            return lines
        again = tf.data.Dataset.range(number, number + tf.gather(is_long, number))
        return lines.concatenate(again.flat_map(functools.partial(files, 0)))

    return read


def _readable(text: TextFiles, most: int, number: np.ndarray) -> list[np.ndarray]:
    """Checks the file with a number, and returns at most so many paths to read: its own."""
    return [np.array([os.fsencode(text.readable(int(number)))])[:most]]


def _shuffled_lines(text: Sentences | TextFiles) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Returns a function that reads the lines of an epoch, with files in random order."""
    if isinstance(text, Sentences):
        return lambda _: _lines(text)
    number, read = len(text.paths), _reader(text)

    def lines(key: tf.Tensor) -> tf.data.Dataset:
        order = _random.stateless_shuffle(tf.range(number, dtype=tf.int64), key)
        files = tf.data.Dataset.from_tensor_slices(order)
        return files.interleave(read, cycle_length=min(number, _FILES_AT_ONCE))

    return lines


def _check_sizes(batch_size: int, sequence_length: int) -> None:
    for name, size in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if size < 1:
            raise InputError(f"{name} is {size}; at least 1 is needed")
