"""The examples in docstrings and in the room's README run as written."""

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import pipemesh.partition

MODULES = [name for _, name, _ in pkgutil.iter_modules(pipemesh.partition.__path__)]


@pytest.mark.parametrize("name", ["", *MODULES])
def test_docstrings(name, capsys):
    if name == "profile":
        pytest.importorskip("tensorflow")
    module = importlib.import_module(f"pipemesh.partition.{name}".rstrip("."))
    assert doctest.testmod(module).failed == 0, capsys.readouterr().out


def test_every_public_name_has_a_docstring():
    for name in pipemesh.partition.__all__:
        assert getattr(pipemesh.partition, name).__doc__


def test_the_command_line_example(capsys):
    import pipemesh.commands.main

    assert doctest.testmod(pipemesh.commands.main).failed == 0, capsys.readouterr().out


def test_readme(capsys):
    text = pathlib.Path(pipemesh.partition.__path__[0], "README.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    assert blocks
    runner = doctest.DocTestRunner()
    for block in blocks:
        test = doctest.DocTestParser().get_doctest(block, {}, "README", "README.md", 0)
        runner.run(test)
    assert runner.failures == 0, capsys.readouterr().out
