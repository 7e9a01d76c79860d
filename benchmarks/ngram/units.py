"""Of what the n-grams are: SentencePiece pieces, or words, of which rare ones are spelled."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from programs import Costs, KenLM, Setting, write_lines

from models.one_billion_word import metrics
from models.one_billion_word.vocabulary import Vocabulary

# Text that can be read again and again.
Text = Callable[[], Iterable[str]]
# A word that occurs less often is rare: its n-grams are those of one token for all rare words.
FEWEST = 3
_RARE = "rare"
_SPELLING = Setting(order=6)
_GROUP_SENTENCES = 4096


@dataclasses.dataclass(frozen=True)
class Source:
    """What n-grams are made of, and by what.

    Attributes:
        kenlm: the programs.
        vocabulary: cuts sentences and words into pieces.
        folder: where files are put.
        learned: the text to learn from.
        scored: the text to score.
    """

    kenlm: KenLM
    vocabulary: Vocabulary
    folder: Path
    learned: Text
    scored: Text


class Unit(Protocol):
    """A kind of n-grams, with a text to learn from and one to score."""

    def __init__(self, source: Source) -> None: ...

    def costs(self, setting: Setting) -> Costs:
        """What the scored text costs."""
        ...


class Pieces:
    """N-grams of pieces."""

    def __init__(self, source: Source) -> None:
        folder, vocabulary = source.folder, source.vocabulary
        self._kenlm = source.kenlm
        # Of the special pieces only the end of a sentence is predicted.
        self._size = vocabulary.size - 2
        self._learned, self._scored = folder / "pieces.learned", folder / "pieces.scored"
        write_lines(self._learned, pieces(source.learned(), vocabulary))
        write_lines(self._scored, pieces(source.scored(), vocabulary))

    def costs(self, setting: Setting) -> Costs:
        """What the scored text costs."""
        return self._kenlm.costs(setting, self._learned, self._scored, vocabulary_size=self._size)


class Words:
    """N-grams of words, and n-grams of pieces to spell rare words.

    What a rare word costs is its place among the words and then its spelling. So every text has a
    probability, as it has under a model of pieces, and both are compared.
    """

    def __init__(self, source: Source) -> None:
        kenlm, folder, vocabulary = source.kenlm, source.folder, source.vocabulary
        learned, scored = source.learned, source.scored
        self._kenlm = kenlm
        counts = collections.Counter(itertools.chain.from_iterable(map(words, learned())))
        frequent = {
            word: str(number)
            for number, (word, count) in enumerate(counts.items())
            if count >= FEWEST
        }
        self._learned, self._scored = folder / "words.learned", folder / "words.scored"
        for path, text in ((self._learned, learned), (self._scored, scored)):
            write_lines(path, ([frequent.get(w, _RARE) for w in words(s)] for s in text()))
        # Each rare word of the text teaches spelling once, like any other.
        rare = (word for word, count in counts.items() if count < FEWEST)
        spelled = folder / "spelling.learned"
        write_lines(spelled, pieces(rare, vocabulary))
        unseen = itertools.chain.from_iterable(map(words, scored()))
        self._unseen = folder / "spelling.scored"
        write_lines(
            self._unseen, pieces((word for word in unseen if word not in frequent), vocabulary)
        )
        self._spelling = kenlm.costs(
            _SPELLING, spelled, self._unseen, vocabulary_size=vocabulary.size - 2
        )

    def costs(self, setting: Setting) -> Costs:
        """What the scored text costs."""
        found = self._kenlm.costs(setting, self._learned, self._scored)
        return dataclasses.replace(
            found,
            nats=found.nats + self._spelling.nats,
            ngrams=found.ngrams + self._spelling.ngrams,
        )


UNITS: dict[str, type[Unit]] = {"pieces": Pieces, "words": Words}


def words(sentence: str) -> list[str]:
    """What spaces separate; between two spaces there is a word of no letters.

    Example:
        >>> words("It is so.")
        ['It', 'is', 'so.']
    """
    return sentence.split(" ")


def pieces(sentences: Iterable[str], vocabulary: Vocabulary) -> Iterator[list[int]]:
    """The pieces of each of the sentences."""
    each = iter(sentences)
    while group := vocabulary.encode_all(itertools.islice(each, _GROUP_SENTENCES)):
        yield from group


def unpredicted(sentences: Iterable[str], vocabulary: Vocabulary) -> metrics.Score:
    """The tokens, words and bytes of a text, as the trainer counts them, at no cost."""
    total = metrics.Score()
    for ids in pieces(sentences, vocabulary):
        labels = np.array([*ids, vocabulary.eos_id])
        total += metrics.score(np.zeros(len(labels)), labels, np.ones(len(labels)), vocabulary)
    return total
