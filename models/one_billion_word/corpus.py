"""The corpus: which text a language model learns from, and which it is judged by.

A sentence is one line of text, or a part of one that is very long (`text_file.lines`). Wherever it
comes from, it is read the same way: bytes that are not UTF-8 become U+FFFD, U+2581 (which
SentencePiece uses for the space) becomes a space, carriage returns go, a byte-order mark at the
line's head goes, ASCII whitespace at both ends goes, and a line that is empty then is no sentence.
`clean` does that in Python; `models.one_billion_word.input` does the same inside `tf.data`, whose
line reader takes every carriage return out.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from . import prose, text_copy, text_file, text_folder
from .text_file import CorpusError

SPACE_MARK = "\u2581"
BYTE_ORDER_MARK = "\ufeff"
WHITESPACE = " \t\n\v\f"

# The file layout of the one-billion-word benchmark below its unpacked folder. Each of its files may
# be packed.
TRAIN_PATTERN = "training-monolingual.tokenized.shuffled/news.en-?????-of-00100"
HELDOUT_PATTERN = "heldout-monolingual.tokenized.shuffled/news.en.heldout-?????-of-00050"

# One embedded sentence in so many is held out.
_HELDOUT_ONE_IN = 12


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Text in memory.

    Attributes:
        lines: the sentences, in order.
    """

    lines: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return (sentence for line in self.lines if (sentence := clean(line)))

    def sample(self, limit: int, characters: int | None = None) -> Iterator[str]:
        """The first `limit` sentences, cut short where they exceed so many characters."""
        return _head(iter(self), limit, characters)

    def digest(self) -> str:
        """A hexadecimal digest of the text."""
        return hashlib.sha256("\n".join(self.lines).encode("utf-8", "replace")).hexdigest()


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Text in files, one sentence a line.

    Attributes:
        paths: the files, in reading order.
    """

    paths: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        readable = (file.readable for file in self._found)
        return itertools.chain.from_iterable(map(_file_sentences, readable))

    def sample(self, limit: int, characters: int | None = None) -> Iterator[str]:
        """At most `limit` sentences and so many characters, from the heads of the files.

        All have the same share. The smallest come first, and what they lack the others give.

        Raises:
            CorpusError: as `digest`.
        """
        files = sorted(self._found, key=lambda file: file.scan.size)
        for left, file in zip(range(len(files), 0, -1), files, strict=True):
            share = None if characters is None else characters // left
            for sentence in _head(_file_sentences(file.readable), limit // left, share):
                limit -= 1
                if characters is not None:
                    characters -= len(sentence)
                yield sentence

    def digest(self) -> str:
        """A hexadecimal digest of what the files say, in their order; all is read for it.

        Neither names nor folders nor packing take part: a copy has the same digest on every host.

        Raises:
            CorpusError: as `text_file.scan`, or as `text_copy.readable`, whose copies are made now.
        """
        return hashlib.sha256(
            "\n".join(file.scan.digest for file in self._found).encode()
        ).hexdigest()

    def sizes(self) -> list[int]:
        """How many bytes of text each file has, unpacked.

        Raises:
            CorpusError: as `digest`.
        """
        return [file.scan.size for file in self._found]

    def readable(self, number: int) -> str:
        """The path of what TensorFlow is to read of a file, if that says what it said at first.

        Args:
            number: the file's place in `paths`.

        Raises:
            CorpusError: it says something else, or cannot be read any more.
        """
        found = self._found[number]
        if found.readable.isprintable() and not os.path.exists(found.readable):
            # TensorFlow says so in fewer words; but it cannot spell every name.
            return found.readable
        if text_file.scan(found.readable).digest != found.digest:
            raise CorpusError(
                f"{self.paths[number]!r} says something else than when training began: what is "
                f"read of it, {found.readable!r}, was written to or replaced"
            )
        return found.readable

    @functools.cached_property
    def _found(self) -> list[_Found]:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            return list(pool.map(_find, self.paths))


class _Found(NamedTuple):
    """What a file was when it was read for the first time.

    Attributes:
        scan: what the file said.
        readable: the path of what TensorFlow reads of it: itself, or a copy.
        digest: that of `readable`.
    """

    scan: text_file.Scan
    readable: str
    digest: str


def _find(path: str) -> _Found:
    readable = text_copy.readable(path)
    return _Found(text_file.scan(path), readable, text_file.scan(readable).digest)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Text to train on and text to judge by.

    Attributes:
        name: what to call it in messages.
        train: the text to train on.
        heldout: the text to judge by; training never reads it.
    """

    name: str
    train: Sentences | TextFiles
    heldout: Sentences | TextFiles


def clean(line: str) -> str:
    """The sentence that a line of text holds, or "" when it holds none."""
    line = line.replace("\r", "").removeprefix(BYTE_ORDER_MARK)
    return line.replace(SPACE_MARK, " ").strip(WHITESPACE)


def load_corpus(
    data_dir: str | None = None,
    train_pattern: str | None = None,
    heldout_pattern: str | None = None,
) -> Corpus:
    """The corpus that the flags ask for: a folder's if `data_dir` is given, else the embedded.

    Raises:
        CorpusError: as `corpus_from_folder`, or a pattern is given without a folder.
    """
    if data_dir:
        return corpus_from_folder(data_dir, train_pattern, heldout_pattern)
    for flag, pattern in (("train", train_pattern), ("heldout", heldout_pattern)):
        if pattern:
            raise CorpusError(
                f"--{flag}_pattern={pattern!r} needs a folder to look in; "
                "give --data_dir too, or neither for the embedded text"
            )
    return embedded_corpus()


def embedded_corpus() -> Corpus:
    """Real English that comes with every CPython: the pages of `pydoc_data.topics`.

    About 2,200 sentences; one in twelve, chosen by a hash of its own text, is held out.
    A sentence that occurs twice is kept once, so none is in both parts. The pages differ a little
    between Python versions; a sentence that two versions share is in the same part of both.
    """
    from pydoc_data import topics

    pages = (topics.topics[name] for name in sorted(topics.topics))
    found = dict.fromkeys(itertools.chain.from_iterable(map(prose.sentences, pages)))
    parts: dict[bool, list[str]] = {False: [], True: []}
    for sentence in found:
        parts[_is_held_out(sentence)].append(sentence)
    return Corpus(
        name="pydoc_data.topics",
        train=Sentences(tuple(parts[False])),
        heldout=Sentences(tuple(parts[True])),
    )


def corpus_from_folder(
    data_dir: str, train_pattern: str | None = None, heldout_pattern: str | None = None
) -> Corpus:
    """A corpus of text files, one sentence a line.

    Args:
        data_dir: the folder.
        train_pattern: a glob relative to the folder (`**` crosses folders) that matches the files
            to train on; unless given, where the one-billion-word benchmark keeps them.
        heldout_pattern: the same for the files to judge by.

    Raises:
        CorpusError: the folder is missing or empty, a pattern matches no file or only files
            without text, a file cannot be read or is no UTF-8, or is matched by both patterns.
    """
    text_folder.check(data_dir)
    train = _matching("train", data_dir, train_pattern, TRAIN_PATTERN)
    heldout = _matching("heldout", data_dir, heldout_pattern, HELDOUT_PATTERN)
    trained_on = {_identity(path) for path in train.paths}
    for path in heldout.paths:
        if _identity(path) in trained_on:
            raise CorpusError(
                f"--heldout_pattern={heldout_pattern or HELDOUT_PATTERN!r} matches {path!r}, "
                f"which --train_pattern={train_pattern or TRAIN_PATTERN!r} matches too; "
                "no held-out file may be trained on"
            )
    # What can be printed: a name may hold anything.
    name = data_dir if data_dir.isprintable() else ascii(data_dir)
    return Corpus(name=name, train=train, heldout=heldout)


def _matching(part: str, data_dir: str, pattern: str | None, default: str) -> TextFiles:
    given = pattern or default
    flag = f"--{part}_pattern={given!r}"
    if not pattern:
        flag += " (the default)"
    packed = [] if pattern else [default + ending for ending in text_folder.PACKED]
    files = text_folder.files(data_dir, given, *packed)
    if not files:
        raise CorpusError(
            f"{flag} matches no file in --data_dir={data_dir!r}; "
            "give a pattern relative to the folder, for example '*.txt'"
        )
    for path in files:
        text_file.check_head(path)
    # A file without text adds nothing.
    texts = [path for path in files if any(True for _ in _file_sentences(path))]
    if not texts:
        raise CorpusError(
            f"{flag} matches no text in --data_dir={data_dir!r}: "
            f"{len(files)} file(s), all blank; one sentence a line is needed"
        )
    return TextFiles(tuple(texts))


def _identity(path: str) -> tuple[int, int]:
    """The same for all names of a file."""
    status = os.stat(path)
    return status.st_dev, status.st_ino


def _head(sentences: Iterator[str], limit: int, characters: int | None) -> Iterator[str]:
    for sentence in itertools.islice(sentences, limit):
        if characters is None:
            yield sentence
            continue
        if sentence := sentence[:characters]:
            yield sentence
        if not (characters := characters - len(sentence)):
            return


def _file_sentences(path: str) -> Iterator[str]:
    for line in text_file.lines(path):
        if sentence := clean(line.decode("utf-8", "replace")):
            yield sentence


def _is_held_out(sentence: str) -> bool:
    # Python's own hash() differs from process to process.
    digest = hashlib.sha256(sentence.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0
