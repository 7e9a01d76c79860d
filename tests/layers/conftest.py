"""Fixtures of the layer tests."""

import pytest

from tests.layers.harness import run_tf1, run_tf2


@pytest.fixture(params=[run_tf1, run_tf2], ids=["tf1", "tf2"])
def run(request):
    return request.param
