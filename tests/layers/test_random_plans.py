"""A few random plans; `python -m tests.layers.random_plans` runs many."""

import pytest

from tests.layers.random_plans import check


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_random_plan_equals_the_plain_stack(seed):
    wrong, _ = check(seed)
    assert wrong is None, wrong
