"""Beam search against all continuations there are, and against a search without a cache."""

import itertools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.decoding import BeamSearch
from pipemesh.errors import DecodingError
from tests.decoding.models import PROMPTS, decoder, in_order, log_probs_of, unpiped

VOCAB = 5


def chain(seed=3):
    """Log probabilities `[VOCAB, VOCAB]` of a token behind another."""
    logits = 2 * np.random.default_rng(seed).standard_normal([VOCAB, VOCAB])
    return tf.nn.log_softmax(tf.constant(logits, tf.float32))


def searched(search, table, first, most, stop=()):
    """Returns the results of a search for prompts that begin with the tokens of `first`."""
    rows = [search.row(number, most, stop) for number in range(len(first))]
    choice = search.begin(tf.gather(table, first), tf.zeros([len(first), 2], tf.int32), stop)
    found = {}
    while True:
        for number, row in enumerate(rows):
            continuation = row.take(*(each[number].numpy() for each in choice.results))
            if continuation is not None:
                found.setdefault(number, continuation)
        if len(found) == len(rows):
            return [found[number] for number in range(len(rows))]
        choice = search.choose(tf.gather(table, choice.ids), choice.state, stop)


def best_of_all(table, first, most, stop, penalty):
    """The best continuation there is, and its score."""
    table = table.numpy()
    best = (-np.inf, ())
    for length in range(1, most + 1):
        for row in itertools.product(range(VOCAB), repeat=length):
            ends = [token in stop for token in row]
            if any(ends[:-1]) or (length < most and not ends[-1]):
                continue
            total = sum(table[a, b] for a, b in itertools.pairwise((first, *row)))
            best = max(best, (total / length**penalty, row))
    return best


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.0])
@pytest.mark.parametrize("stop", [(), (2,), (0, 4)])
def test_enough_beams_find_the_best_continuation(stop, penalty):
    table, most = chain(), 3
    search = BeamSearch(beams=VOCAB // (1 + len(stop)), length_penalty=penalty)
    wide = BeamSearch(beams=VOCAB**2, length_penalty=penalty)
    for first in range(VOCAB):
        score, row = best_of_all(table, first, most, stop, penalty)
        (found,) = searched(search, table, [first], most, stop)
        got = sum(found.log_probs) / len(found.tokens) ** penalty
        assert got <= score + 1e-5
        exact = wide_search(wide, table, first, most, stop)
        assert exact.tokens == row
        np.testing.assert_allclose(sum(exact.log_probs) / len(row) ** penalty, score, rtol=1e-5)


def wide_search(search, table, first, most, stop):
    """A search that keeps all beginnings, of a vocabulary that is wide enough for so many beams.

    Tokens that are added are never likely.
    """
    width = search.beams * (1 + len(stop))
    wide = np.full([width, width], -1e4, np.float32)
    wide[:VOCAB, :VOCAB] = table.numpy()
    (found,) = searched(search, tf.constant(wide), [first], most, stop)
    return found


@pytest.mark.parametrize("seed", range(5))
def test_one_beam_is_greedy(seed):
    table, stop = chain(seed), (2,)
    (found,) = searched(BeamSearch(1), table, [1], 6, stop)
    row = [1]
    while len(row) < 7 and row[-1] not in stop:
        row.append(int(tf.argmax(table[row[-1]])))
    assert list(found.tokens) == row[1:] and not found.others


def test_no_beam_hides_that_another_is_not_a_number():
    logits = tf.constant([[0.0, 9.0, 8.0], [0.0, float("nan"), 0.0]])
    results = BeamSearch(2).choose(logits, tf.constant([0.0, -1.0]), ()).results
    assert np.isnan(results[-1]).all()


def test_any_penalty_is_a_number():
    (found,) = searched(BeamSearch(2, 1000.0), chain(), [0], 4, (2,))
    # No score differs from 0 any more.
    assert 1 <= len(found.tokens) <= 4 and len(found.others) == 1


def test_other_continuations_are_worse_and_sorted():
    found = searched(BeamSearch(2), chain(), [0, 3], 4, (2,))
    for each in found:
        scores = [sum(one.log_probs) / len(one.tokens) for one in (each, *each.others)]
        assert scores == sorted(scores, reverse=True) and len(scores) == 2
        for one in (each, *each.others):
            assert one.stopped == (one.tokens[-1] == 2) and one.number == each.number


def test_longer_ones_win_where_the_penalty_is_large():
    """One token is likelier than five, whose mean is better."""
    table = tf.math.log([[0.55, 0.03, 0.4, 0.02]] * 4)
    short, long = (
        searched(BeamSearch(2, penalty), table, [0], 5, (2,))[0] for penalty in (0.0, 1.0)
    )
    assert short.tokens == (2,) and short.stopped
    assert long.tokens == (0,) * 5 and not long.stopped


def by_hand(task, prompt, beams, most):
    """A search over a model without a cache, by all rows anew."""
    of = log_probs_of(task)
    going = [((), 0.0)]
    for _ in range(most):
        options = []
        for row, total in going:
            chances = of([*prompt, *row])
            for token in np.argsort(-chances)[:beams]:
                options.append(((*row, int(token)), total + float(chances[token])))
        going = sorted(options, key=lambda option: -option[1])[:beams]
    return going


@pytest.mark.slow
def test_beam_search_equals_the_model_without_cache(eagerly):
    beams, most, prompts = 3, 5, PROMPTS[:3]
    wanted = [by_hand(unpiped(), prompt, beams, most) for prompt in prompts]
    made = decoder(unpiped(), 2, 1, BeamSearch(beams))
    found = in_order(made.generate(prompts, most))
    for each, options in zip(found, wanted, strict=True):
        assert [one.tokens for one in (each, *each.others)] == [row for row, _ in options]
        np.testing.assert_allclose(sum(each.log_probs), options[0][1], rtol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: BeamSearch(0), "beams is 0; give 1 or more"),
        (lambda: BeamSearch(2, -1.0), "length_penalty is -1.0; give 0 or more"),
        (lambda: BeamSearch(2, float("nan")), "length_penalty is nan"),
        (
            lambda: BeamSearch(6).check(VOCAB * 2, {3}),
            "6 beams look at 12 tokens, but there are 10; give 5 at most",
        ),
    ],
)
def test_invalid_settings_are_one_line(make, message):
    with pytest.raises(DecodingError, match=message):
        make()
