"""The data for evaluation during a run: a fixed sample of the whole held-out text."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable

from pipemesh.training.subject import Sample

from .corpus import Corpus, Sentences
from .input import heldout_dataset
from .vocabulary import Vocabulary

# The sample depends only on the text, not on flags, so that runs can be compared.
_SEED = 20131211


def draw(
    corpus: Corpus, vocabulary: Vocabulary, *, batch_size: int, sequence_length: int, batches: int
) -> Sample:
    """Draws a sample of at least 1 and at most `batches` batches, with equal odds for all
    sentences.

    The sample is a function of the text. If the whole text fits, it is used in order. Batches are
    as in `packing.pack`, and remain available if a file vanishes.
    """
    sizes = {"batch_size": batch_size, "sequence_length": sequence_length}
    found = list(itertools.islice(heldout_dataset(corpus, vocabulary, **sizes), batches + 1))
    if len(found) <= batches:
        return Sample(found, f"all of the held-out text, {len(found)} batches")
    drawn, number = _drawn(corpus.heldout, vocabulary, batches * batch_size * sequence_length)
    dataset = heldout_dataset(Corpus(corpus.name, corpus.train, drawn), vocabulary, **sizes)
    taken = list(dataset.take(batches))
    what = f"{len(taken)} batches of sentences drawn evenly from all {number:,} held-out ones"
    return Sample(taken, what)


def _drawn(text: Iterable[str], vocabulary: Vocabulary, positions: int) -> tuple[Sentences, int]:
    """Returns sentences in random order that fill `positions`, and the number they were drawn from.

    Only these sentences are in memory. Each fills at least its bytes divided by the longest piece,
    plus one for its end.
    """
    rng = random.Random(_SEED)
    longest = int(vocabulary.piece_bytes.max())
    # The last sentence in the order is first in the heap.
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
