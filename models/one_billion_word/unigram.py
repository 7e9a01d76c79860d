"""The unigram model, a baseline that any language model must beat.

It knows the frequency of each token, and nothing of the context.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from . import metrics
from .corpus import Sentences, TextFiles
from .vocabulary import Vocabulary

# Enough tokens for good frequencies of a vocabulary of 32,000 pieces.
MAX_TOKENS = 20_000_000
# Limits of sentences and characters that are tokenized together.
_GROUP_SENTENCES = 4096
_GROUP_CHARACTERS = 1 << 18


@dataclasses.dataclass(frozen=True)
class Unigram:
    """Token probabilities that do not depend on the context.

    Attributes:
        vocabulary: the tokens.
        nats: negative log probability of each token, float64 [vocabulary.size].
    """

    vocabulary: Vocabulary
    nats: np.ndarray

    def score(self, batches: Iterable[Any]) -> metrics.Score:
        """Scores the labels of finite batches, without padding."""
        total = metrics.Score()
        for batch in batches:
            labels, weights = np.asarray(batch["labels"]), np.asarray(batch["weights"])
            total += metrics.score(self.nats[labels], labels, weights, self.vocabulary)
        return total


def fit_unigram(
    text: Sentences | TextFiles,
    vocabulary: Vocabulary,
    *,
    alpha: float = 0.5,
    max_tokens: int = MAX_TOKENS,
) -> Unigram:
    """Counts the tokens of a text, including ends of sentences, and adds `alpha` to every count.

    BOS is never predicted and has no share. Adding half a count is the Krichevsky-Trofimov
    estimator. Counting stops after the group of sentences that reaches `max_tokens`. An `alpha` not
    above 0 raises ValueError.
    """
    if not alpha > 0:
        raise ValueError(f"alpha is {alpha}; above 0 every token has a probability")
    counts = np.zeros([vocabulary.size], np.int64)
    for sentences in _groups(text):
        group = vocabulary.encode_all(sentences)
        tokens = np.fromiter(itertools.chain.from_iterable(group), np.int64)
        counts += np.bincount(tokens, minlength=vocabulary.size)
        counts[vocabulary.eos_id] += len(group)
        if counts.sum() >= max_tokens:
            break
    smoothed = counts + alpha
    smoothed[vocabulary.bos_id] = 0
    with np.errstate(divide="ignore"):
        nats = np.log(smoothed.sum()) - np.log(smoothed)
    return Unigram(vocabulary, nats)


def _groups(text: Iterable[str]) -> Iterator[list[str]]:
    group, characters = [], 0
    for sentence in text:
        group.append(sentence)
        characters += len(sentence)
        if len(group) == _GROUP_SENTENCES or characters >= _GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
    if group:
        yield group
