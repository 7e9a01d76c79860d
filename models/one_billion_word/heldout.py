"""What a model is judged by while it trains: a fixed sample of the whole held-out text."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Iterable
from typing import Any

from .corpus import Corpus, Sentences
from .input import heldout_dataset
from .vocabulary import Vocabulary

# The sample depends on the text alone: not on a flag, so that runs can be compared.
_SEED = 20131211


@dataclasses.dataclass(frozen=True)
class HeldoutSample:
    """Batches in memory: a file that vanishes takes no evaluation with it.

    Attributes:
        batches: as `packing.pack` describes them.
        whole: whether they are all of the held-out text.
        sentences: how many sentences all of the text has; 0 if not known.
    """

    batches: list[dict[str, Any]]
    whole: bool
    sentences: int

    def __str__(self) -> str:
        number = len(self.batches)
        if self.whole:
            return f"all of the held-out text, {number} batches"
        return (
            f"{number} batches of sentences drawn evenly from all {self.sentences:,} held-out ones"
        )


def draw(
    corpus: Corpus, vocabulary: Vocabulary, *, batch_size: int, sequence_length: int, batches: int
) -> HeldoutSample:
    """Draws a sample: every sentence is as likely to be in it as any other.

    The same text gives the same sample, whoever draws it. Where all of the text fits, it is taken
    as it is, in order.

    Args:
        corpus: whose held-out text to sample.
        vocabulary: cuts it into pieces.
        batch_size: rows of a batch, B.
        sequence_length: positions of a row, T.
        batches: at most so many batches, at least 1.
    """
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
    found = list(itertools.islice(heldout_dataset(corpus, vocabulary, **sizes), batches + 1))
    if len(found) <= batches:
        return HeldoutSample(found, whole=True, sentences=0)
    drawn, number = _drawn(corpus.heldout, vocabulary, batches * batch_size * sequence_length)
    dataset = heldout_dataset(Corpus(corpus.name, corpus.train, drawn), vocabulary, **sizes)
    return HeldoutSample(list(dataset.take(batches)), whole=False, sentences=number)


def _drawn(text: Iterable[str], vocabulary: Vocabulary, positions: int) -> tuple[Sentences, int]:
    """Sentences in random order that fill so many positions, and of how many they were drawn.

    No more is in memory than these need: each fills at least as many positions as the longest piece
    goes into it, and one with its end.
    """
    rng = random.Random(_SEED)
    longest = int(vocabulary.piece_bytes.max())
    # The last in the order is the first of the heap.
    heap: list[tuple[float, int, str, int]] = []
    filled = number = 0
    for sentence in text:
        key = rng.random()
        number += 1
        if filled >= positions and -key <= heap[0][0]:
            continue
        fills = len(sentence.encode()) // longest + 2
        heapq.heappush(heap, (-key, -number, sentence, fills))
        filled += fills
        while filled - heap[0][-1] >= positions:
            filled -= heapq.heappop(heap)[-1]
    return Sentences(tuple(sentence for _, _, sentence, _ in sorted(heap, reverse=True))), number
