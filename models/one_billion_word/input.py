"""The input: batches of packed rows, read from a corpus through `tf.data`.

The order of the training data is a pure function of the seed: every epoch visits the files in
another order, reads several at a time, and shuffles the lines block by block with a key made of
seed, epoch and block. There is no random state, so a saved iterator is a position and the lines
in its hands, and one that is restored in another process goes on with the very next batch:

    iterator = iter(train_dataset(corpus, vocabulary, batch_size=8, sequence_length=128, seed=1))
    checkpoint = tf.train.Checkpoint(iterator=iterator)

Restore it into an iterator that was built with the same arguments.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import tensorflow as tf
import tensorflow_text

from models.one_billion_word import packing
from models.one_billion_word.corpus import (
    BYTE_ORDER_MARK,
    SPACE_MARK,
    WHITESPACE,
    Corpus,
    Sentences,
    TextFiles,
)
from models.one_billion_word.vocabulary import Vocabulary
from pipemesh.errors import PipemeshError

_random = tf.random.experimental  # pyright: ignore[reportAttributeAccessIssue]

# Lines that are shuffled together, and that a saved iterator holds at most.
BLOCK_LINES = 4096
# Files that are read in turn, line by line.
_FILES_AT_ONCE = 16
# Lines that are tokenized in one call.
_GROUP_LINES = 64
# Read ahead; a saved iterator holds them, and an error among them.
PREFETCHED_BATCHES = 2
_BLANKS = rf"\A\r*{BYTE_ORDER_MARK}[{WHITESPACE}\r]*|\A[{WHITESPACE}\r]+|\r|[{WHITESPACE}\r]+\z"


class InputError(PipemeshError, ValueError):
    """A dataset was asked for that cannot be read."""


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
    """Batches to train on, without end, in another order each epoch.

    Args:
        corpus: whose training text to read.
        vocabulary: cuts it into pieces.
        batch_size: rows of a batch, B.
        sequence_length: positions of a row, T.
        seed: equal seeds give equal batches.
        num_shards: number of readers that share the text. In each epoch every sentence is read
            by exactly one of them.
        shard: which of the readers this is, from 0.
        first_epoch: number of the first epoch; each has an order of its own.

    Returns:
        Batches as `packing.pack` describes them, without padding.

    Raises:
        InputError: a size below 1, a shard outside `num_shards`, or fewer sentences than shards.
    """
    _check_sizes(batch_size, sequence_length)
    _check_shards(corpus, num_shards, shard)

    # As they are: AutoGraph would take longer to read them than TensorFlow to run them.
    @tf.autograph.experimental.do_not_convert
    def epoch_lines(epoch: tf.Tensor) -> tf.data.Dataset:
        key = _random.stateless_fold_in(tf.constant([seed, 0], tf.int64), epoch)
        lines = _shuffled_lines(corpus.train, key, num_shards, shard).batch(BLOCK_LINES)

        @tf.autograph.experimental.do_not_convert
        def shuffle(block: tf.Tensor, lines: tf.Tensor) -> tf.Tensor:
            block_key = _random.stateless_fold_in(key, block + 1)
            return _random.stateless_shuffle(lines, block_key)

        return lines.enumerate().map(shuffle)

    blocks = tf.data.Dataset.counter(first_epoch).flat_map(epoch_lines)
    return _batches(blocks, vocabulary, batch_size, sequence_length)


def heldout_dataset(
    corpus: Corpus,
    vocabulary: Vocabulary,
    *,
    batch_size: int,
    sequence_length: int,
) -> tf.data.Dataset:
    """Batches of the held-out text, once and in order.

    Args:
        corpus: whose held-out text to read.
        vocabulary: cuts it into pieces.
        batch_size: rows of a batch, B; the last batch is padded to it.
        sequence_length: positions of a row, T.

    Returns:
        Batches as `packing.pack` describes them.

    Raises:
        InputError: a size below 1.
    """
    _check_sizes(batch_size, sequence_length)
    blocks = _lines(corpus.heldout).batch(_GROUP_LINES)
    return _batches(blocks, vocabulary, batch_size, sequence_length)


@tf.autograph.experimental.do_not_convert
def sentences(lines: tf.Tensor) -> tf.Tensor:
    """What `corpus.clean` does, for lines in a string tensor [any]: string [at most as many]."""
    lines = tf.strings.unicode_transcode(
        lines, "UTF-8", "UTF-8", errors="replace", replace_control_characters=False
    )
    lines = tf.strings.regex_replace(lines, SPACE_MARK, " ")
    lines = tf.strings.regex_replace(lines, _BLANKS, "")
    return tf.boolean_mask(lines, tf.not_equal(lines, ""))


def tokenizer(vocabulary: Vocabulary) -> Callable[[tf.Tensor], tf.RaggedTensor]:
    """`vocabulary.encode` as a TensorFlow function: string [n] -> int32 [n, (pieces)]."""
    made: Any = tensorflow_text.SentencepieceTokenizer(
        model=vocabulary.model,
        out_type=tf.int32,  # pyright: ignore[reportArgumentType]
    )
    return made.tokenize


def _batches(
    blocks: tf.data.Dataset, vocabulary: Vocabulary, batch_size: int, sequence_length: int
) -> tf.data.Dataset:
    stream = packing.token_stream(
        blocks.rebatch(_GROUP_LINES).map(sentences),
        tokenizer(vocabulary),
        vocabulary.bos_id,
        vocabulary.eos_id,
    )
    batches = packing.pack(
        stream,
        batch_size=batch_size,
        sequence_length=sequence_length,
        bos_id=vocabulary.bos_id,
    )
    return batches.prefetch(PREFETCHED_BATCHES).with_options(_options())


def _options() -> tf.data.Options:
    """One thread feeds the devices many times over; the other cores are theirs.

    `deterministic` stays as it is: every step is sequential, so the order cannot depend on it,
    and lingvo sets it and warns when it finds it set.
    """
    options = tf.data.Options()
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return options


def _lines(text: Sentences | TextFiles) -> tf.data.Dataset:
    if isinstance(text, Sentences):
        return tf.data.Dataset.from_tensor_slices(tf.constant(text.lines, tf.string))
    return tf.data.Dataset.range(len(text.paths)).flat_map(_reader(text))


def _reader(text: TextFiles) -> Callable[[tf.Tensor], tf.data.Dataset]:
    """Gives the lines of the file with a number.

    A number and not a path, because a saved iterator holds it: the same files may lie elsewhere
    when it is restored.
    """
    paths, packed = tf.constant(text.paths), tf.constant(text.compressions())

    @tf.autograph.experimental.do_not_convert
    def read(number: tf.Tensor) -> tf.data.Dataset:
        return tf.data.TextLineDataset(tf.gather(paths, number), tf.gather(packed, number))

    return read


def _shuffled_lines(
    text: Sentences | TextFiles, key: tf.Tensor, num_shards: int, shard: int
) -> tf.data.Dataset:
    """One epoch of a shard's lines; files are in random order, lines within a file are not."""
    if isinstance(text, Sentences):
        return _take_turns(_lines(text), num_shards, shard)
    by_file = len(text.paths) >= num_shards
    numbers = list(range(len(text.paths)))
    if by_file:
        numbers = numbers[shard::num_shards]
    order = _random.stateless_shuffle(tf.constant(numbers, tf.int64), key)
    lines = tf.data.Dataset.from_tensor_slices(order).interleave(
        _reader(text), cycle_length=min(len(numbers), _FILES_AT_ONCE)
    )
    # All shards have the same key, so those that share files see the same order.
    return lines if by_file else _take_turns(lines, num_shards, shard)


def _take_turns(lines: tf.data.Dataset, num_shards: int, shard: int) -> tf.data.Dataset:
    if num_shards == 1:
        return lines
    # Blank lines take no turn: where every second line is blank, one of two shards had no text.
    has_text = lines.filter(lambda line: tf.size(sentences(line[tf.newaxis])) > 0)
    return has_text.shard(num_shards, shard)


def _check_sizes(batch_size: int, sequence_length: int) -> None:
    for name, size in (("batch_size", batch_size), ("sequence_length", sequence_length)):
        if size < 1:
            raise InputError(f"{name} is {size}; at least 1 is needed")


def _check_shards(corpus: Corpus, num_shards: int, shard: int) -> None:
    if not 0 <= shard < num_shards:
        raise InputError(f"shard {shard} of {num_shards} shards; shards count from 0")
    # A shard without sentences would search for one for ever.
    found = sum(1 for _ in itertools.islice(corpus.train, num_shards))
    if found < num_shards:
        raise InputError(
            f"{num_shards} shards share the {found} training sentences of {corpus.name}; "
            "use at most as many shards as sentences"
        )
