"""The reference has every public name; `make docs` builds it, and fails at a warning."""

import importlib
import inspect
import pathlib
import pkgutil
import re

import pipemesh
import pipemesh.errors
from pipemesh.lowering import ops
from pipemesh.lowering.registry import OPS

PAGES = (pathlib.Path(__file__).parents[2] / "docs" / "api").glob("*.md")
TEXT = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
# Modules with all their names, or with some of them; and names by themselves.
MODULES = dict(re.findall(r"^\.\. automodule:: (\S+)\n +:members:(.*)$", TEXT, re.MULTILINE))
NAMES = set(re.findall(r"^\.\. (?:auto|py:)(?:function|class|data):: (\S+)$", TEXT, re.MULTILINE))


def public_names():
    """Modules and names of doors; of names that several doors have, the first."""
    seen, names = [], [(ops.__name__, name) for name in (*OPS, "gradients")]
    for module in pkgutil.walk_packages(pipemesh.__path__, "pipemesh."):
        door = importlib.import_module(module.name) if module.ispkg else None
        for name in getattr(door, "__all__", ()):
            thing = getattr(door, name)
            if not inspect.ismodule(thing) and not any(thing is other for other in seen):
                seen.append(thing)
                names.append((module.name, name))
    errors = inspect.getmembers(pipemesh.errors, inspect.isclass)
    return [*names, *(("pipemesh.errors", name) for name, _ in errors)]


def is_documented(module, name):
    """Returns whether a page has a name, which needs a docstring to be listed with its module."""
    if {name, f"{module}.{name}"} & NAMES:
        return True
    thing, chosen = getattr(importlib.import_module(module), name), MODULES.get(module)
    is_taken = chosen == "" or name in re.findall(r"\w+", chosen or "")
    return is_taken and callable(thing) and bool(thing.__doc__)


def test_every_public_name_is_in_the_reference():
    names = public_names()
    assert [each for each in names if not is_documented(*each)] == []
    assert {
        ("pipemesh.partition", "partition"),
        ("pipemesh.plan", "Plan"),
        ("pipemesh.recurrent", "REMAT_POLICIES"),
        ("pipemesh.layers", "PipeliningLayer"),
        ("pipemesh.errors", "PlanError"),
        (ops.__name__, "einsum"),
    } <= set(names)
    assert not is_documented("pipemesh.text", "columns")
