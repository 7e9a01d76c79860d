"""Public names of the room have complete docstrings."""

import inspect
import re

import pytest

import pipemesh.report


@pytest.mark.parametrize("name", pipemesh.report.__all__)
def test_public_names_describe_what_they_take_and_return(name):
    thing = getattr(pipemesh.report, name)
    text = inspect.getdoc(thing)
    if inspect.isclass(thing):
        assert re.search("^(Attributes|Args):", text, re.MULTILINE)
        return
    assert "Example:" in text and "Returns:" in text
    for parameter in inspect.signature(thing).parameters:
        assert re.search(rf"^ +\**{parameter}: ", text, re.MULTILINE), parameter


def test_the_door_lists_its_names_in_order():
    assert pipemesh.report.__all__ == sorted(pipemesh.report.__all__)
