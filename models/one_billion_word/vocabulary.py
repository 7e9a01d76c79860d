"""The vocabulary: SentencePiece pieces, with the bytes and words of text in each.

SentencePiece writes the space as U+2581, and puts one such mark before every sentence. With byte
fallback and without normalization no character is lost. So the pieces of a sentence spell the front
mark and then exactly its bytes. The mark counts as one byte, and the front mark stands for the
newline after the sentence. So EOS counts no byte, and a sentence counts `len(sentence.encode()) +
1` bytes. Words are counted as in the one-billion-word benchmark: separated by spaces, plus one for
EOS.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import io
import itertools
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import sentencepiece
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import PipemeshError

from .corpus import SPACE_MARK, Corpus, Sentences, TextFiles

# Limits of sentences and characters from which pieces are learned. More change little, and cost
# minutes and gigabytes.
SAMPLE_LIMIT = 200_000
SAMPLE_CHARACTERS = 1 << 24
# Longer sentences are split into parts of this many characters. SentencePiece skips a line beyond
# its limit, and a text of one line would leave it nothing.
_LONGEST_PART = 1 << 12
_BYTES_A_CHARACTER = 4
# Part of the cached file's name: raise it if `train_vocabulary` changes.
_RECIPE = 3
_QUIET = 2
# SentencePiece reserves this character, and ignores a line that contains it.
_RESERVED = "\u2585"
_TOO_SMALL = re.compile(r"smaller than required_chars\. -?\d+ vs (\d+)")
_TOO_LARGE = re.compile(r"set it to a value <= (\d+)")


class VocabularyError(PipemeshError, ValueError):
    """A vocabulary cannot be learned or loaded."""


class Vocabulary:
    """The pieces of a trained SentencePiece model.

    Attributes:
        model: the serialized model, bytes.
        digest: a hexadecimal digest of `model`.
        size: number of pieces, including the special ones.
        bos_id, eos_id: ids of the pieces around a sentence; `encode` returns neither.
        piece_bytes: int32 [size], bytes of text in a piece; a sentence's pieces sum to
            `len(sentence.encode()) + 1`.
        piece_words: int32 [size], words that start in a piece; a sentence's pieces and EOS sum to
            `sentence.count(" ") + 2`.

    Raises:
        VocabularyError: `model` is not a SentencePiece model with BOS and EOS.
    """

    def __init__(self, model: bytes) -> None:
        try:
            self._processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        except RuntimeError as error:
            raise VocabularyError(f"not a SentencePiece model: {error}") from error
        self.model = model
        self.digest = hashlib.sha256(model).hexdigest()
        self.size = self._processor.get_piece_size()
        self.bos_id = self._processor.bos_id()
        self.eos_id = self._processor.eos_id()
        if min(self.bos_id, self.eos_id) < 0:
            raise VocabularyError("the SentencePiece model has no BOS or no EOS piece")

    def encode(self, sentence: str) -> list[int]:
        """Returns the ids of a sentence's pieces."""
        return self._processor.encode(sentence, num_threads=1)

    def encode_all(self, sentences: Iterable[str]) -> list[list[int]]:
        """Returns the ids of the pieces of many sentences, on the calling thread."""
        return self._processor.encode(list(sentences), num_threads=1)

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of pieces; the inverse of `encode`."""
        return self._processor.decode([int(piece) for piece in ids])

    @functools.cached_property
    def piece_bytes(self) -> np.ndarray:
        """Returns the bytes of text in each piece."""
        return self._table(byte=1, text=lambda text: len(text.replace(SPACE_MARK, " ").encode()))

    @functools.cached_property
    def piece_words(self) -> np.ndarray:
        """Returns the words that start in each piece."""
        words = self._table(byte=0, text=lambda text: text.count(SPACE_MARK))
        words[self.eos_id] = 1
        return words

    def _table(self, byte, text) -> np.ndarray:
        table = np.zeros([self.size], np.int32)
        for piece in range(self.size):
            if self._processor.is_byte(piece):
                table[piece] = byte
            elif not (self._processor.is_control(piece) or self._processor.is_unknown(piece)):
                table[piece] = text(self._processor.id_to_piece(piece))
        return table


def load_vocabulary(corpus: Corpus, size: int, cache_dir: str) -> Vocabulary:
    """Returns the vocabulary of a corpus, learned at first use and then read from `cache_dir`.

    The file is `vocab-<size>-<digest of the training text>-<digest of the file>.model`. It is
    written under another name and renamed, so that a killed process or a race leaves a whole file.
    Its own digest reveals flipped bits. Unusable text raises CorpusError or VocabularyError.
    """
    identity = hashlib.sha256(f"{_RECIPE} {corpus.train.digest()}".encode()).hexdigest()
    name = f"vocab-{size}-{identity[:12]}"
    found = sorted(glob.glob(f"{name}-*.model", root_dir=cache_dir or "."))
    if not found:
        vocabulary = train_vocabulary(corpus.train, size)
        path = os.path.join(cache_dir, f"{name}-{vocabulary.digest[:12]}.model")
        try:
            write_whole(path, vocabulary.model)
        except OSError as error:
            raise VocabularyError(
                f"the vocabulary cannot be written to {path!r} ({error.strerror}); make room, or "
                "give another folder"
            ) from error
        return vocabulary
    path = os.path.join(cache_dir, found[0])
    with open(path, "rb") as file:
        model = file.read()
    if found[0] != f"{name}-{hashlib.sha256(model).hexdigest()[:12]}.model":
        raise VocabularyError(
            f"{path!r} is damaged: it is not what was written; delete it and run again"
        )
    return Vocabulary(model)


def train_vocabulary(text: Sentences | TextFiles, size: int) -> Vocabulary:
    """Learns a unigram vocabulary from a sample of a text.

    At most `SAMPLE_LIMIT` sentences and `SAMPLE_CHARACTERS` characters are used, from the start of
    each file. Equal text and size give equal pieces, because one thread learns from a fixed sample.
    It raises VocabularyError if the text supports only larger or only smaller vocabularies.
    """
    sample = text.sample(SAMPLE_LIMIT, SAMPLE_CHARACTERS)
    model = io.BytesIO()
    with tempfile.NamedTemporaryFile("w", suffix=".tsv") as rules:
        # This single rule has no effect. Without any rule, processors print a line on every load,
        # and the one inside TensorFlow cannot be silenced.
        rules.write(f"{ord(SPACE_MARK):X}\t20\n")
        rules.flush()
        try:
            sentencepiece.SentencePieceTrainer.train(
                sentence_iterator=itertools.chain.from_iterable(map(_parts, sample)),
                model_writer=model,
                model_type="unigram",
                # SentencePiece reports the minimum number of pieces only from 3, the special ones,
                # on.
                vocab_size=max(size, 3),
                byte_fallback=True,
                normalization_rule_tsv=rules.name,
                remove_extra_whitespaces=False,
                max_sentence_length=_LONGEST_PART * _BYTES_A_CHARACTER,
                unk_id=0,
                bos_id=1,
                eos_id=2,
                pad_id=-1,
                num_threads=1,
                minloglevel=_QUIET,
            )
        except RuntimeError as error:
            raise VocabularyError(_explain(size, str(error))) from error
    return Vocabulary(_without_rules_path(model.getvalue()))


def _parts(sentence: str) -> Iterator[str]:
    """Cuts a long sentence, at spaces if there are any."""
    sentence = sentence.replace(_RESERVED, " ")
    begin = 0
    while len(sentence) - begin > _LONGEST_PART:
        longest = begin + _LONGEST_PART
        end = sentence.rfind(" ", begin + 1, longest)
        # Without a space, the next part looks like the start of a word, as for every sentence.
        end, following = (end, end + 1) if end > 0 else (longest, longest)
        yield sentence[begin:end]
        begin = following
    yield sentence[begin:]


def _without_rules_path(model: bytes) -> bytes:
    """Removes the name of the temporary file from a model, so that equal texts give equal models.

    SentencePiece's message classes need a newer protobuf than TensorFlow's. So this reads the model
    as a message with one known field, and passes the rest through.
    """
    file = descriptor_pb2.FileDescriptorProto(name="rules_path.proto", package="pipemesh.rules")
    spec = file.message_type.add(name="NormalizerSpec")
    spec.field.add(name="normalization_rule_tsv", number=6, type=9, label=1)
    proto = file.message_type.add(name="ModelProto")
    proto.field.add(
        name="normalizer_spec",
        number=3,
        type=11,
        label=1,
        type_name=".pipemesh.rules.NormalizerSpec",
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    descriptor = pool.FindMessageTypeByName("pipemesh.rules.ModelProto")
    message: Any = message_factory.GetMessageClass(descriptor).FromString(model)
    message.normalizer_spec.ClearField("normalization_rule_tsv")
    return message.SerializeToString()


def _explain(size: int, message: str) -> str:
    if match := _TOO_LARGE.search(message):
        return (
            f"--vocab_size={size} is too large for the training text, which supports at most "
            f"{match[1]} pieces; give a smaller size or more text"
        )
    if match := _TOO_SMALL.search(message):
        return (
            f"--vocab_size={size} is too small: the 256 bytes, the special pieces and the "
            f"characters of the training text need at least {match[1]} pieces"
        )
    return f"--vocab_size={size}: no vocabulary can be learned from the training text: {message}"
