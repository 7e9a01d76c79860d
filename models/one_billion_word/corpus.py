"""The corpus: the training text and the held-out text of a language model.

A sentence is a line of text, or a part of a very long line (`text_file.lines`). Every source is
read in the same way:

* Bytes that are not UTF-8 become U+FFFD.
* U+2581, SentencePiece's mark for the space, becomes a space.
* Carriage returns, a byte-order mark at the start, and ASCII whitespace at both ends are removed.
* A line that is empty then is not a sentence.

`clean` does this in Python, `models.one_billion_word.input` inside `tf.data`, whose line reader
removes every carriage return.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from pipemesh.data import text_file
from pipemesh.data.text_file import CorpusError

from . import prose, text_copy, text_folder

SPACE_MARK = "\u2581"
BYTE_ORDER_MARK = "\ufeff"
WHITESPACE = " \t\n\v\f"

# The file layout of the one-billion-word benchmark in its unpacked folder. Its files may be packed.
TRAIN_PATTERN = "training-monolingual.tokenized.shuffled/news.en-?????-of-00100"
HELDOUT_PATTERN = "heldout-monolingual.tokenized.shuffled/news.en.heldout-?????-of-00050"

# One of this number of embedded sentences is held out.
_HELDOUT_ONE_IN = 12


@dataclasses.dataclass(frozen=True)
class Sentences:
    """Text in memory: its sentences, in order."""

    lines: tuple[str, ...]

    def __iter__(self) -> Iterator[str]:
        return (sentence for line in self.lines if (sentence := clean(line)))

    def sample(self, limit: int, characters: int | None = None) -> Iterator[str]:
        """Yields the first `limit` sentences, cut off after `characters` characters."""
        return _head(iter(self), limit, characters)

    def digest(self) -> str:
        """Returns a hexadecimal digest of the text."""
        return hashlib.sha256("\n".join(self.lines).encode("utf-8", "replace")).hexdigest()


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Text in files, in reading order, with a sentence on each line."""

    paths: tuple[str, ...]

    def __reduce__(self) -> Any:
        # Another process reads its own files under these paths.
        digests = tuple(file.scan.digest for file in self._found)
        return _text_there, (tuple(map(os.path.abspath, self.paths)), digests)

    def __iter__(self) -> Iterator[str]:
        readable = (file.readable for file in self._found)
        return itertools.chain.from_iterable(map(_file_sentences, readable))

    def sample(self, limit: int, characters: int | None = None) -> Iterator[str]:
        """Yields at most `limit` sentences and `characters` characters, from the starts of the
        files.

        All files have the same share. The smallest come first, and larger ones fill what these
        lack.
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
        """Returns a hexadecimal digest of the text in all files, in order; it reads all of it.

        Names, folders and packing do not matter, so a copy has the same digest on every host.
        Unreadable files raise CorpusError, as in `text_file.scan` and `text_copy.readable`, which
        makes copies now.
        """
        return hashlib.sha256(
            "\n".join(file.scan.digest for file in self._found).encode()
        ).hexdigest()

    def sizes(self) -> list[int]:
        """Returns the number of bytes in each file's unpacked text."""
        return [file.scan.size for file in self._found]

    def readable(self, number: int) -> str:
        """Returns the path that TensorFlow reads for file `number`; raises CorpusError if it has
        changed.
        """
        found = self._found[number]
        if found.readable.isprintable() and not os.path.exists(found.readable):
            # TensorFlow reports this more briefly, but cannot print every name.
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
    """The state of a file when it was first read.

    Attributes:
        scan: the result of reading it.
        readable: the path that TensorFlow reads: the file itself, or a copy.
        digest: the digest of `readable`.
    """

    scan: text_file.Scan
    readable: str
    digest: str


def _text_there(paths: tuple[str, ...], digests: tuple[str, ...]) -> TextFiles:
    """Returns the files of another process's `TextFiles`; raises CorpusError if their text differs
    here.
    """
    found = TextFiles(paths)
    for file, path, digest in zip(found._found, paths, digests, strict=True):
        if file.scan.digest != digest:
            raise CorpusError(
                f"{path!r} says something else than where training was started; put the same file "
                "there"
            )
    return found


def _find(path: str) -> _Found:
    readable = text_copy.readable(path)
    return _Found(text_file.scan(path), readable, text_file.scan(readable).digest)


@dataclasses.dataclass(frozen=True)
class Corpus:
    """Training text and held-out text.

    Attributes:
        name: its name in messages.
        train: the training text.
        heldout: the text for evaluation, which training never reads.
    """

    name: str
    train: Sentences | TextFiles
    heldout: Sentences | TextFiles


def clean(line: str) -> str:
    """Returns the sentence in a line of text, or "" if there is none."""
    line = line.replace("\r", "").removeprefix(BYTE_ORDER_MARK)
    return line.replace(SPACE_MARK, " ").strip(WHITESPACE)


def load_corpus(
    data_dir: str | None = None,
    train_pattern: str | None = None,
    heldout_pattern: str | None = None,
) -> Corpus:
    """Returns the corpus of a folder, or without `data_dir` the embedded one.

    It raises CorpusError as `corpus_from_folder`, or for a pattern without a folder.
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
    """Returns the English text in every CPython: the pages of `pydoc_data.topics`.

    It has about 2,200 sentences. One in twelve, chosen by a hash of its text, is held out. Repeated
    sentences are kept once, so no sentence is in both parts. The pages differ a little between
    Python versions; a sentence that two versions share is in the same part of both.
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
    """Returns a corpus of text files with a sentence on each line.

    Patterns are globs relative to the folder, and `**` crosses folders. The default patterns are
    those of the one-billion-word benchmark. It raises CorpusError for a missing or empty folder,
    and for a pattern without matches or text. A file that is unreadable, not UTF-8, or matched by
    both patterns raises it, too.
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
    # File names may contain unprintable characters.
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
    # Files without text are ignored.
    texts = [path for path in files if any(True for _ in _file_sentences(path))]
    if not texts:
        raise CorpusError(
            f"{flag} matches no text in --data_dir={data_dir!r}: "
            f"{len(files)} file(s), all blank; one sentence a line is needed"
        )
    return TextFiles(tuple(texts))


def _identity(path: str) -> tuple[int, int]:
    """Returns device and inode, which are equal for all names of a file."""
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
    # Python's hash() differs from process to process.
    digest = hashlib.sha256(sentence.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0
