"""Scores count real tokens, and add up."""

import math

import numpy as np
import pytest

from models.one_billion_word import metrics
from models.one_billion_word.metrics import Score


def test_the_units():
    score = Score(nats=24 * math.log(2), tokens=6, words=4, bytes=12)
    assert score.bits_per_byte == pytest.approx(2.0)
    assert score.token_perplexity == pytest.approx(2.0**4)
    assert score.word_perplexity == pytest.approx(2.0**6)


def test_parts_add_up():
    total = Score(1.5, 2, 3, 4) + Score(2.5, 20, 30, 40)
    assert total == Score(4.0, 22, 33, 44)
    assert total + Score() == total


def test_the_ends_of_the_scale():
    assert math.isnan(metrics.bits_per_byte(0.0, 0))
    assert math.isnan(metrics.ratio(1.0, 0.0))
    assert math.isnan(metrics.perplexity(1.0, 0))
    assert metrics.perplexity(1e6, 1) == math.inf
    assert math.isnan(metrics.perplexity(math.nan, 1))


def test_padding_counts_nothing_whatever_it_holds(vocabulary):
    ids = [*vocabulary.encode("two words"), vocabulary.eos_id]
    labels = np.array([[*ids, 0, 0]])
    weights = np.array([[1.0] * len(ids) + [0.0, 0.0]], np.float32)
    nats = np.where(weights > 0, 0.5, np.nan).astype(np.float32)
    score = metrics.score(nats, labels, weights, vocabulary)
    assert score == Score(nats=0.5 * len(ids), tokens=len(ids), words=3, bytes=10)
