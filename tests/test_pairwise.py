"""Every two values meet by default, and the product is there if asked for."""

import itertools

import pytest

from tests.pairwise import in_turn, pairwise


@pytest.mark.parametrize("sizes", [(8, 4, 2), (7, 2, 2), (3, 3, 3, 3), (5, 1)])
def test_every_two_values_meet(sizes):
    factors = [[f"{number}:{value}" for value in range(size)] for number, size in enumerate(sizes)]
    params = pairwise(*factors)
    assert [param.values for param in params] == list(itertools.product(*factors))
    default = [param.values for param in params if not param.marks]
    for a, b in itertools.combinations(factors, 2):
        for pair in itertools.product(a, b):
            assert any(set(pair) <= set(values) for values in default)
    # No more than twice as many as the two longest factors need.
    longest = sorted(sizes)[-2:]
    assert len(default) <= 2 * longest[0] * longest[1]


def test_values_of_several_parameters_are_written_out():
    (param,) = pairwise([("a", 1)], ["b"])
    assert param.values == ("a", 1, "b")


def test_each_value_comes_once_in_turn():
    params = in_turn("ab", [(1, "x"), (2, "y"), (3, "z")])
    assert len(params) == 6
    default = [param.values for param in params if not param.marks]
    assert sorted(default) == [("a", 1, "x"), ("a", 3, "z"), ("b", 2, "y")]
