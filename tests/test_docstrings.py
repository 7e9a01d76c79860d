"""Public names of the rooms are documented in full."""

import inspect
import re

import pytest

import pipemesh.report
import pipemesh.schedule

DOORS = [pipemesh.report, pipemesh.schedule]
PUBLIC = [
    pytest.param(getattr(door, name), id=f"{door.__name__}.{name}")
    for door in DOORS
    for name in door.__all__
]


@pytest.mark.parametrize("thing", PUBLIC)
def test_public_names_document_arguments_and_results(thing):
    text = inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert re.search("^(Attributes|Args):", text, re.MULTILINE)
        return
    assert "Example:" in text
    assert "Returns:" in text
    for parameter in inspect.signature(thing).parameters:
        assert re.search(rf"^ +\**{parameter}: ", text, re.MULTILINE), parameter


@pytest.mark.parametrize("door", DOORS)
def test_doors_list_their_names_in_order(door):
    assert door.__all__ == sorted(door.__all__)
    assert all(hasattr(door, name) for name in door.__all__)
