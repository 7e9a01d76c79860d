"""The documentation builds without a warning, and has every public name."""

import importlib
import inspect
import pathlib
import pkgutil
import subprocess
import sys
import zlib

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
    command = [sys.executable, "-m", "sphinx", "-b", "html", "-c", "docs", "-W", "--keep-going"]
    built = subprocess.run(
        [*command, "-n", "-q", ".", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert built.returncode == 0, built.stderr[-4000:]
    # Four lines of text, and then compressed lines: name, kind, and where it is.
    entries = (out / "objects.inv").read_bytes().split(b"\n", 4)[4]
    lines = [line.split() for line in zlib.decompress(entries).decode().splitlines()]
    return {line[0] for line in lines if line[1].startswith("py:")}


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
