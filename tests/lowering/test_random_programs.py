"""A few random programs; `python -m tests.lowering.random_programs` runs many."""

import pytest

from tests.lowering.random_programs import check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(4))
def test_a_random_program_does_not_depend_on_the_layout(seed):
    wrong = check(seed)
    assert wrong is None, wrong
