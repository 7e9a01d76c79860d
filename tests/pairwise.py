"""Of a product of parameters the few cases in which every two values meet."""

import itertools

import pytest


def pairwise(*factors):
    """The whole product as pytest's params, of which those that show no new pair are `exhaustive`.

    Args:
        *factors: the values of each parameter; those that are tuples of several parameters are
            written out one after the other.
    """
    product = list(itertools.product(*map(range, map(len, factors))))
    chosen = covering({case: _pairs(case) for case in product})
    params = []
    for case in product:
        values = []
        for factor, index in zip(factors, case, strict=True):
            value = factor[index]
            values += value if isinstance(value, tuple) else [value]
        marks = () if case in chosen else pytest.mark.exhaustive
        params.append(pytest.param(*values, marks=marks))
    return params


def in_turn(*factors):
    """The whole product as pytest's params; those beyond one of each value are `exhaustive`.

    For factors that do not meet in the code: each is tried with some value of the others.

    Args:
        *factors: as for `pairwise`.
    """
    longest = max(map(len, factors))
    chosen = {tuple(turn % len(factor) for factor in factors) for turn in range(longest)}
    params = []
    for case in itertools.product(*map(range, map(len, factors))):
        values = []
        for factor, index in zip(factors, case, strict=True):
            value = factor[index]
            values += value if isinstance(value, tuple) else [value]
        marks = () if case in chosen else pytest.mark.exhaustive
        params.append(pytest.param(*values, marks=marks))
    return params


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
