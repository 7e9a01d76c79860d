"""Every public name is documented in full, and the examples of the README run."""

import doctest
import inspect
import re
from pathlib import Path

import pytest

import pipemesh.schedule

DOORS = [pipemesh.schedule]
PUBLIC = [
    pytest.param(getattr(door, name), id=f"{door.__name__}.{name}")
    for door in DOORS
    for name in door.__all__
]


@pytest.mark.parametrize("thing", PUBLIC)
def test_public_names_document_arguments_and_results(thing):
    text = inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert "Attributes:" in text
        return
    assert "Example:" in text
    assert "Returns:" in text
    for parameter in inspect.signature(thing).parameters:
        assert re.search(rf"^ +{parameter}: ", text, re.MULTILINE), parameter


@pytest.mark.parametrize("door", DOORS)
def test_doors_list_their_names_in_order(door):
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
