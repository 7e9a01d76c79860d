"""The corpus: which text a language model learns from, and which it is judged by.

A sentence is one line of text. Wherever it comes from, it is read the same way: bytes that are
not UTF-8 become U+FFFD, U+2581 (which SentencePiece uses for the space) becomes a space, carriage
returns go, a byte-order mark at the line's head goes, ASCII whitespace at both ends goes, and a
line that is empty then is no sentence. `clean` does that in Python;
`models.one_billion_word.input` does the same inside `tf.data`, whose line reader takes every
carriage return out.
"""

from __future__ import annotations

import dataclasses
import glob
import hashlib
import io
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from models.one_billion_word import prose, text_file
from models.one_billion_word.text_file import CorpusError

SPACE_MARK = "\u2581"
BYTE_ORDER_MARK = "\ufeff"
WHITESPACE = " \t\n\v\f"

# The file layout of the one-billion-word benchmark below its unpacked folder.
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
        return itertools.chain.from_iterable(_file_sentences(path) for path in self.paths)

    def sample(self, limit: int, characters: int | None = None) -> Iterator[str]:
        """At most `limit` sentences and so many characters, a share from the head of each file."""
        share, extra = divmod(limit, len(self.paths))
        share_of_characters = characters and characters // len(self.paths)
        for position, path in enumerate(self.paths):
            yield from _head(_file_sentences(path), share + (position < extra), share_of_characters)

    def digest(self) -> str:
        """A hexadecimal digest of what the files say, in their order; all is read for it.

        Neither names nor folders nor packing take part: a copy has the same digest on every host.

        Raises:
            CorpusError: as `text_file.digest`.
        """
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            digests = pool.map(text_file.digest, self.paths)
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()

    def compressions(self) -> list[str]:
        """How each of the files is packed, as `tf.data` calls it."""
        return [text_file.compression(path) for path in self.paths]


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
            without text, a file is no UTF-8, or is matched by both patterns.
    """
    if not os.path.isdir(data_dir):
        state = "is a file" if os.path.exists(data_dir) else "does not exist"
        raise CorpusError(f"--data_dir={data_dir!r} {state}; give a folder with text files")
    if not os.listdir(data_dir):
        raise CorpusError(f"--data_dir={data_dir!r} is empty; give a folder with text files")
    train = _matching("train", data_dir, train_pattern, TRAIN_PATTERN)
    heldout = _matching("heldout", data_dir, heldout_pattern, HELDOUT_PATTERN)
    trained_on = {os.path.realpath(path) for path in train.paths}
    for path in heldout.paths:
        if os.path.realpath(path) in trained_on:
            raise CorpusError(
                f"--heldout_pattern={heldout_pattern or HELDOUT_PATTERN!r} matches {path!r}, "
                f"which --train_pattern={train_pattern or TRAIN_PATTERN!r} matches too; "
                "no held-out file may be trained on"
            )
    return Corpus(name=data_dir, train=train, heldout=heldout)


def _matching(part: str, data_dir: str, pattern: str | None, default: str) -> TextFiles:
    given = pattern or default
    flag = f"--{part}_pattern={given!r}"
    if not pattern:
        flag += " (the default)"
    matches = glob.glob(given, root_dir=data_dir, recursive=True)
    paths = [os.path.join(data_dir, match) for match in sorted(matches)]
    files = [path for path in paths if os.path.isfile(path)]
    if not files:
        raise CorpusError(
            f"{flag} matches no file in --data_dir={data_dir!r}; "
            "give a pattern relative to the folder, for example '*.txt'"
        )
    for path in files:
        text_file.check_head(path)
    # A file without text adds nothing, but a reader whose share is only such files would search
    # for a sentence for ever.
    texts = [path for path in files if any(True for _ in _file_sentences(path))]
    if not texts:
        raise CorpusError(
            f"{flag} matches no text in --data_dir={data_dir!r}: "
            f"{len(files)} file(s), all blank; one sentence a line is needed"
        )
    return TextFiles(tuple(texts))


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
    # Lines end at "\n" alone, as `tf.data.TextLineDataset` has it.
    with (
        text_file.open_text(path) as file,
        io.TextIOWrapper(file, encoding="utf-8", errors="replace", newline="\n") as lines,
    ):
        for line in lines:
            if sentence := clean(line):
                yield sentence


def _is_held_out(sentence: str) -> bool:
    # Python's own hash() differs from process to process.
    digest = hashlib.sha256(sentence.encode()).digest()
    return int.from_bytes(digest[:8], "big") % _HELDOUT_ONE_IN == 0
