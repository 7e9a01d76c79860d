"""Fixtures of the layer tests."""

import pytest
from lingvo.core import py_utils

from tests.layers.harness import run_tf1, run_tf2


@pytest.fixture
def eagerly():
    """Where a stack asks for its devices when it is made."""
    py_utils.SetEagerMode(True, test_mode=True)
    yield
    py_utils.SetEagerMode(False, test_mode=True)


@pytest.fixture(params=[run_tf1, run_tf2], ids=["tf1", "tf2"])
def run(request):
    return request.param
