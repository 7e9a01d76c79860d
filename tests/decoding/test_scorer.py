"""Scores of texts, however they are packed."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from lingvo.core import py_utils

from pipemesh.decoding import Scorer
from pipemesh.errors import DecodingError
from tests.decoding.models import LENGTH, PROMPTS, VOCAB_SIZE, log_probs_of, unpiped

ROWS = 2


def loss_of(batch):
    """Returns losses from the label and all ids of the segment so far."""
    losses = np.zeros(batch["ids"].shape, np.float32)
    for row, column in np.ndindex(*losses.shape):
        segment = batch["segment_ids"][row, column]
        if segment:
            own = batch["segment_ids"][row, : column + 1] == segment
            assert batch["segment_pos"][row, column] == own.sum() - 1
            assert batch["weights"][row, column] == 1
            before = batch["ids"][row, : column + 1][own]
            losses[row, column] = 1e-3 * (before.sum() + 7 * batch["labels"][row, column])
        else:
            values = [batch[name][row, column] for name in batch]
            assert values == [0] * len(values)
    return losses


texts = st.lists(st.lists(st.integers(0, 19), min_size=2, max_size=9), max_size=12)


@settings(deadline=None)
@given(texts, st.integers(1, 3))
def test_no_text_sees_another_and_none_is_lost(given_texts, rows):
    scorer = Scorer(loss_of, rows=rows, length=8, vocab_size=20)
    found = list(scorer.score(given_texts))
    assert [each.number for each in found] == list(range(len(given_texts)))
    for each, text in zip(found, given_texts, strict=True):
        assert list(each.tokens) == text[1:]
        wanted = [-1e-3 * (sum(text[:i]) + 7 * text[i]) for i in range(1, len(text))]
        np.testing.assert_allclose(each.log_probs, wanted, rtol=1e-5)
        np.testing.assert_allclose(each.log_prob, sum(wanted), rtol=1e-5)


@pytest.mark.slow
def test_log_probs_equal_the_models(eagerly):
    task = unpiped()

    @tf.function(autograph=False)
    def losses(batch):
        with task.cluster(do_eval=True):
            return task.evaluate(batch, lambda _, per_example: per_example.xent)

    scorer = Scorer(losses, rows=ROWS, length=LENGTH, vocab_size=VOCAB_SIZE)
    texts = [prompt for prompt in PROMPTS if len(prompt) > 1]
    found, of = list(scorer.score(texts)), log_probs_of(task)
    with py_utils.GlobalStepContext(task.step):
        for each, text in zip(found, texts, strict=True):
            wanted = [of(text[:i])[text[i]] for i in range(1, len(text))]
            np.testing.assert_allclose(each.log_probs, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ([3], "text 1 has 1 tokens; give 2 or more, the first is not scored"),
        ([], "text 1 has 0 tokens"),
        ([1] * 10, "text 1 has 9 tokens to be scored, which exceeds the model's 8"),
        ([1, 20], "text 1 has the token 20; ids are from 0 to 19"),
    ],
)
def test_a_text_that_cannot_be_scored_is_one_line(text, message):
    scorer = Scorer(loss_of, rows=1, length=8, vocab_size=20)
    with pytest.raises(DecodingError, match=message):
        list(scorer.score([[1, 2], text]))


def test_logits_that_are_not_numbers_are_no_score():
    """They were scores of NaN; a token that is impossible has minus infinity."""

    def scored(value, text):
        def compute(batch):
            return batch["weights"] * value

        return list(Scorer(compute, rows=1, length=8, vocab_size=20).score([text]))

    with pytest.raises(DecodingError, match="logits are not numbers"):
        scored(np.nan, [1, 2])
    (found,) = scored(np.inf, [*range(1, 10)])
    assert found.log_prob == -np.inf and found.perplexity == np.inf
