"""What the tests of this room share."""

import pytest
from lingvo.core import py_utils


@pytest.fixture
def eagerly():
    """lingvo's eager mode."""
    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(False, test_mode=True)
