"""Of a product of parameters the few cases in which every two values meet."""

import itertools

import pytest


def pairwise(*factors):
    """The whole product as pytest's params, of which those that show no new pair are `exhaustive`.

    Args:
        *factors: the values of each parameter; those that are tuples of several parameters are
            written out one after the other.
    """
    chosen = covering({case: _pairs(case) for case in _product(factors)})
    return _params(factors, chosen)


def in_turn(*factors):
    """The whole product as pytest's params; those beyond one of each value are `exhaustive`.

    For factors that do not meet in the code: each is tried with some value of the others.

    Args:
        *factors: as for `pairwise`.
    """
    longest = max(map(len, factors))
    chosen = {tuple(turn % len(factor) for factor in factors) for turn in range(longest)}
    return _params(factors, chosen)


def covering(cases):
    """Of some cases a few that show all that any of them does.

    Args:
        cases: for each the set of what it shows.
    """
    chosen, missing = set(), set().union(*cases.values())
    while missing:
        # The first of those that show most; there is one, since a case shows what is missing.
        best = max(cases, key=lambda case: len(missing & cases[case]))
        chosen.add(best)
        missing -= cases[best]
    return chosen


def _pairs(case):
    return set(itertools.combinations(enumerate(case), 2))


def _product(factors):
    return itertools.product(*map(range, map(len, factors)))


def _params(factors, chosen):
    """The whole product, of which those that are not chosen are `exhaustive`."""
    params = []
    for case in _product(factors):
        values = []
        for factor, index in zip(factors, case, strict=True):
            value = factor[index]
            values += value if isinstance(value, tuple) else [value]
        marks = () if case in chosen else pytest.mark.exhaustive
        params.append(pytest.param(*values, marks=marks))
    return params
