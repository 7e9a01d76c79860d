"""Runs as many cases of tests as are asked for, and each test in an empty folder of its own,
whatever lies in the checkout and in the environment."""

import collections
import os
import pathlib
import shutil
import signal
import tempfile
import zlib

import pytest

ROOT = pathlib.Path(__file__).parent
TESTS = ROOT / "tests"
# Rooms whose tests are quick because they need no TensorFlow. Of each file of the others, which new
# rooms are too, `--cases=few` runs one case of so many tests.
PURE = [TESTS / room for room in ("mesh", "partition", "plan", "schedule")]
_FEW = 3


# The folder of all tests of a call, which its processes share.
_FOLDER = "PIPEMESH_TESTS_FOLDER"
# Variables that change what commands do.
_FOREIGN = {"all_proxy", "columns", "grpc_proxy", "http_proxy", "https_proxy", "no_color"}
_FOREIGN |= {"no_grpc_proxy", "no_proxy", "pythonoptimize", "tf_config", "xdg_cache_home"}


def pytest_configure(config):
    """Makes what processes inherit independent of the caller's environment."""
    if _FOLDER not in os.environ:
        config.own_folder = os.environ[_FOLDER] = tempfile.mkdtemp(prefix="pipemesh-tests-")
        for name in os.environ.copy():
            if name.lower() in _FOREIGN or name.startswith(("SLURM_", "OMPI_", "MV2_", "PMI_")):
                del os.environ[name]
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A shell starts what runs in its background so, and what tests start would inherit it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["XDG_CACHE_HOME"] = os.path.join(os.environ[_FOLDER], "cache")
    # A command that a test starts finds the packages of this checkout from any folder.
    os.environ["PYTHONPATH"] = str(ROOT)


def pytest_unconfigure(config):
    """Removes the folder of the tests."""
    if hasattr(config, "own_folder"):
        shutil.rmtree(config.own_folder, ignore_errors=True)
        del os.environ[_FOLDER]


@pytest.fixture(autouse=True)
def own_folder():
    """Runs a test in an empty folder."""
    with tempfile.TemporaryDirectory(dir=os.environ[_FOLDER]) as folder:
        os.chdir(folder)
        yield
        os.chdir(ROOT)


def pytest_addoption(parser):
    """Adds `--cases`."""
    parser.addoption(
        "--cases",
        choices=("few", "most", "all"),
        default="most",
        help="all; most: without those marked exhaustive; few: without those marked slow either, "
        f"and outside the pure rooms one case of {_FEW} tests a file",
    )


def pytest_collection_modifyitems(config, items):
    """Leaves out what `--cases` does not ask for."""
    cases = config.option.cases
    marks = {"all": (), "most": ("exhaustive",), "few": ("exhaustive", "slow")}[cases]
    kept = [item for item in items if not any(map(item.get_closest_marker, marks))]
    if cases == "few":
        kept = _few(kept)
    left = set(kept)
    config.hook.pytest_deselected(items=[item for item in items if item not in left])
    items[:] = kept


def _few(items):
    """All tests of the pure rooms, and one case of some tests of each file of the others."""
    chosen = collections.defaultdict(dict)
    # Not the first ones, which often are the simplest.
    for item in sorted(items, key=lambda item: zlib.crc32(item.nodeid.encode())):
        if len(chosen[item.path]) < _FEW:
            chosen[item.path].setdefault(item.nodeid.partition("[")[0], item)
    few = {item for tests in chosen.values() for item in tests.values()}
    return [
        item for item in items if item in few or any(room in item.path.parents for room in PURE)
    ]
