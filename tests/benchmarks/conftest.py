"""Benchmarks are programs, not packages: the modules in the folder of one import each other."""

import importlib
import pathlib
import sys

import pytest

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def modules_of(monkeypatch):
    """Imports modules of a benchmark's folder, and forgets them afterwards."""
    folders = []

    def load(folder, *names):
        folders.append(str(BENCHMARKS / folder))
        monkeypatch.syspath_prepend(folders[-1])
        return [importlib.import_module(name) for name in names]

    yield load
    for name, module in list(sys.modules.items()):
        if (getattr(module, "__file__", None) or "").startswith(tuple(folders) or "\0"):
            del sys.modules[name]
