"""Runs snippets of READMEs and guides as tests, and as many cases of tests as are asked for."""

import pathlib
import zlib

from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser

pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser()], patterns=["README.md", "docs/guides/*.md"]
).pytest()

TESTS = pathlib.Path(__file__).parent / "tests"
# Rooms whose tests are quick because they need no TensorFlow. Of all others, those that are new
# included, `--cases=few` runs few.
PURE = [TESTS / room for room in ("mesh", "partition", "plan", "schedule")]


def pytest_addoption(parser):
    """Adds `--cases`."""
    parser.addoption(
        "--cases",
        choices=("few", "most", "all"),
        default="most",
        help="all; most: without those marked exhaustive; few: without those marked slow either, "
        "and outside the pure rooms one case of each test",
    )


def pytest_collection_modifyitems(config, items):
    """Leaves out what `--cases` does not ask for."""
    cases = config.option.cases
    dropped = [
        item
        for item in items
        if (cases != "all" and item.get_closest_marker("exhaustive"))
        or (cases == "few" and item.get_closest_marker("slow"))
    ]
    if cases == "few":
        dropped += _repetitions([item for item in items if item not in set(dropped)])
    gone = set(dropped)
    config.hook.pytest_deselected(items=dropped)
    items[:] = [item for item in items if item not in gone]


def _repetitions(items):
    """All cases but one of each test outside the pure rooms."""
    seen, repetitions = set(), []
    # Not the first one, which often is the simplest.
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        test = item.nodeid.partition("[")[0]
        if test in seen:
            repetitions.append(item)
        elif not any(room in item.path.parents for room in PURE):
            seen.add(test)
    return repetitions
