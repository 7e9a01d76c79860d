"""Slow tests of this folder run when asked for: `python -m pytest tests/partition -m slow`."""

import pathlib

import pytest

HERE = pathlib.Path(__file__).parent


def pytest_collection_modifyitems(config, items):
    if "slow" in config.option.markexpr:
        return
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(pytest.mark.skip(reason="takes minutes; run with -m slow"))
