"""Tests that the versions on the page of installation are those that the project declares."""

import ast
import importlib.metadata
import pathlib
import re
import sys

import pytest

from pipemesh.text import toml_of

ROOT = pathlib.Path(__file__).parents[2]


def supported():
    text = (ROOT / "docs/guides/install.md").read_text(encoding="utf-8")
    section = text.partition("## What is supported")[2].partition("\n\n**")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if "|" in line]
    return {name: versions for name, versions, *_ in rows[2:]}


def test_versions_are_those_of_the_project():
    project = toml_of(str(ROOT / "pyproject.toml"))["project"]
    needed = project["optional-dependencies"]["tensorflow"]
    found, least = supported(), "3.10"
    pythons = [line.rpartition(" ")[2] for line in project["classifiers"] if ":: 3." in line]
    assert found["Python"] == f"{least} to {pythons[-1]}"
    assert project["requires-python"] == f">={pythons[0]},<3.{int(pythons[-1][2:]) + 1}"
    assert pythons[0] == least
    (tensorflow,) = [line for line in needed if line.startswith("tensorflow>")]
    assert tensorflow.startswith(f"tensorflow>={found['TensorFlow']},<")
    assert f"lingvo=={found['lingvo']}" in needed


# Functions that name optional dependencies, and the argument that does.
NAMING = {"install": 0, "MissingPackageError": 2, "needed": 2}


def test_errors_name_optional_dependencies_that_exist():
    """One said `pip install '.[models]'`."""
    extras = toml_of(str(ROOT / "pyproject.toml"))["project"]["optional-dependencies"]
    named = set()
    for path in (path for room in ("pipemesh", "models") for path in (ROOT / room).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
            for extra in node.args[NAMING[name] :][:1] if name in NAMING else ():
                named |= {extra.value} if isinstance(extra, ast.Constant) else set()
    assert named >= {"data", "examples"}
    assert named <= extras.keys()


@pytest.mark.parametrize("name", ["tensorflow", "tensorflow-text", "lingvo"])
def test_wheels_need_no_later_glibc(name):
    tags = importlib.metadata.distribution(name).read_text("WHEEL") or ""
    needed = [(int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)_", tags)]
    needed += [(2, 17)] * ("manylinux2014" in tags)
    assert needed, tags
    most = re.match(r"(\d+)\.(\d+) or later", supported()["glibc"])
    assert min(needed) <= (int(most[1]), int(most[2]))
    assert (3, 10) <= sys.version_info[:2] <= (3, 13)
