"""The documentation builds without a warning, and has every public name."""

import importlib
import inspect
import pathlib
import pickle
import pkgutil
import subprocess
import sys

import pytest

import pipemesh
import pipemesh.errors
from pipemesh.lowering import ops
from pipemesh.lowering.registry import OPS

ROOT = pathlib.Path(__file__).parents[2]


def public_names():
    """Names at doors; of those that several doors have, the first."""
    seen, names = [], [f"pipemesh.lowering.ops.{name}" for name in (*OPS, "gradients")]
    for module in pkgutil.walk_packages(pipemesh.__path__, "pipemesh."):
        door = importlib.import_module(module.name) if module.ispkg else None
        for name in getattr(door, "__all__", ()):
            thing = getattr(door, name)
            if not inspect.ismodule(thing) and not any(thing is other for other in seen):
                seen.append(thing)
                names.append(f"{module.name}.{name}")
    errors = inspect.getmembers(pipemesh.errors, inspect.isclass)
    return [*names, *(f"pipemesh.errors.{name}" for name, _ in errors)]


@pytest.fixture(scope="module")
def documented(tmp_path_factory):
    """The names that the documentation has a place for."""
    out = tmp_path_factory.mktemp("docs")
    # All pages are read and their references resolved; no page is written.
    options = ["-b", "dummy", "-c", "docs", "-d", str(out), "-W", "--keep-going", "-n", "-q"]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ".", str(out)],
        **{"cwd": ROOT, "capture_output": True, "text": True, "timeout": 280},
    )
    assert built.returncode == 0, built.stderr[-4000:]
    environment = pickle.loads((out / "environment.pickle").read_bytes())
    return set(environment.domaindata["py"]["objects"])


@pytest.mark.slow
def test_every_public_name_is_in_the_reference(documented):
    assert [name for name in public_names() if name not in documented] == []


@pytest.mark.slow
def test_what_is_not_public_is_not_in_the_reference(documented):
    assert "pipemesh.text.columns" not in documented


def test_public_names_are_those_of_all_doors():
    names = public_names()
    assert {
        "pipemesh.partition.partition",
        "pipemesh.plan.Plan",
        "pipemesh.recurrent.REMAT_POLICIES",
        "pipemesh.layers.PipeliningLayer",
        "pipemesh.errors.PlanError",
        f"{ops.__name__}.einsum",
    } <= set(names)
