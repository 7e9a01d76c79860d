"""The sample that models are judged by while they train."""

import collections

import numpy as np

from models.one_billion_word import heldout
from models.one_billion_word.corpus import Corpus, Sentences
from models.one_billion_word.input import heldout_dataset


def sentences(sample, vocabulary):
    """The whole sentences of a sample."""
    labels = np.concatenate(
        [batch["labels"].numpy()[batch["weights"].numpy() > 0] for batch in sample.batches]
    )
    found, pieces = [], []
    for piece in labels:
        if piece == vocabulary.eos_id:
            found.append(vocabulary.decode(pieces))
            pieces = []
        else:
            pieces.append(piece)
    return found


def draw(corpus, vocabulary, batches):
    return heldout.draw(corpus, vocabulary, batch_size=2, sequence_length=32, batches=batches)


def test_the_sample_comes_from_all_of_the_text_and_is_always_the_same(vocabulary):
    # Four kinds of text one after the other: the head of it is of the first kind only.
    lines = [
        f"{kind} {number}" for kind in ("red", "green", "blue", "grey") for number in range(99)
    ]
    corpus = Corpus("kinds", Sentences(("x",)), Sentences(tuple(lines)))
    sample = draw(corpus, vocabulary, 6)
    assert len(sample.batches) == 6 and not sample.whole and sample.sentences == len(lines)
    assert all(batch["weights"].numpy().all() for batch in sample.batches), "no padding"
    found = sentences(sample, vocabulary)
    assert set(found) <= set(lines) and len(set(found)) == len(found) > 30
    kinds = collections.Counter(line.split()[0] for line in found)
    assert len(kinds) == 4 and min(kinds.values()) > len(found) / 10
    again = draw(corpus, vocabulary, 6)
    for one, two in zip(sample.batches, again.batches, strict=True):
        np.testing.assert_array_equal(one["ids"], two["ids"])
    assert str(sample) == "6 batches of sentences drawn evenly from all 396 held-out ones"


def test_a_text_that_fits_is_taken_whole_and_in_order(corpus, vocabulary):
    few = Corpus("few", corpus.train, Sentences(corpus.heldout.lines[:9]))
    sample = draw(few, vocabulary, 99)
    assert sample.whole
    assert sentences(sample, vocabulary) == list(few.heldout)
    whole = list(heldout_dataset(few, vocabulary, batch_size=2, sequence_length=32))
    assert str(sample) == f"all of the held-out text, {len(whole)} batches"


def test_one_sentence_that_is_longer_than_the_sample(vocabulary):
    corpus = Corpus("one", Sentences(("x",)), Sentences(("a b c " * 999,)))
    assert len(draw(corpus, vocabulary, 2).batches) == 2
