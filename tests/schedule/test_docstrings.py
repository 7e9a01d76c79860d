"""Every example runs, and every public name has what the design asks for."""

import doctest
import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import pytest

import pipemesh.commands.main
import pipemesh.schedule
import pipemesh.schedule.builders
import pipemesh.schedule.render

MODULES = [
    "pipemesh.commands.main",
    "pipemesh.schedule",
    *(
        module.name
        for module in pkgutil.walk_packages(pipemesh.schedule.__path__, "pipemesh.schedule.")
    ),
]
DOORS = [pipemesh.schedule, pipemesh.schedule.builders, pipemesh.schedule.render]
PUBLIC = [
    pytest.param(getattr(door, name), id=f"{door.__name__}.{name}")
    for door in DOORS
    for name in door.__all__
    if name != "BUILDERS"
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_run(name):
    failed, _ = doctest.testmod(importlib.import_module(name))
    assert failed == 0


@pytest.mark.parametrize("thing", PUBLIC)
def test_public_names_say_what_they_take_give_and_raise(thing):
    text = inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert "Attributes:" in text
        return
    assert "Example:" in text
    assert "Returns:" in text
    for parameter in inspect.signature(thing).parameters:
        assert re.search(rf"^ +{parameter}: ", text, re.MULTILINE), parameter


@pytest.mark.parametrize("door", DOORS)
def test_doors_list_what_they_offer_in_order(door):
    assert door.__all__ == sorted(door.__all__)
    assert all(hasattr(door, name) for name in door.__all__)


def test_readme_examples_run():
    text = (Path(pipemesh.schedule.__file__).parent / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    names = {}
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, names, "README.md", None, 0)
        runner = doctest.DocTestRunner()
        runner.run(test, clear_globs=False)
        names.update(test.globs)
        assert runner.failures == 0


def test_modules_are_small():
    for path in Path(pipemesh.schedule.__file__).parent.rglob("*.py"):
        assert len(path.read_text().splitlines()) <= 400, path
