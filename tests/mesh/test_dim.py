"""A dim by itself."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ShapeError
from pipemesh.mesh import Dim

NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_]*", fullmatch=True)
BLANKS = st.text(alphabet=" \t\n", max_size=2)


@given(NAMES, st.integers(0, 10**12), st.lists(BLANKS, min_size=4, max_size=4))
def test_text_parses_back_with_any_blanks(name, size, blanks):
    dim = Dim(name, size)
    a, b, c, d = blanks
    assert Dim.from_text(str(dim)) == dim
    assert Dim.from_text(f"{a}{name}{b}:{c}{size}{d}") == dim


@pytest.mark.parametrize(
    "text", ["", "heads", "heads=8", ":8", "heads:", "heads:-1", "heads:2.0", "8:heads", "a b:8"]
)
def test_other_text_is_an_error_with_an_example(text):
    with pytest.raises(ShapeError) as error:
        Dim.from_text(text)
    assert str(error.value) == f"{text!r} is not name:size; write for example 'heads:8'"


@pytest.mark.parametrize(
    ("name", "size", "message"),
    [
        ("a b", 1, "'a b' is no name"),
        (3, 2, "3 is no name"),
        ("a", -1, "size -1"),
        ("a", 2.5, "size 2.5; sizes are whole"),
        ("a", 2.0, "size 2.0"),
        ("a", float("nan"), "size nan"),
        ("a", True, "size True"),
        ("a", "2", "size '2'"),
        ("a", None, "size None"),
    ],
)
def test_what_is_no_name_or_no_size_is_named(name, size, message):
    with pytest.raises(ShapeError, match=message):
        Dim(name, size)


def test_a_size_may_be_an_integer_of_numpy():
    dim = Dim("a", np.int64(3))
    assert dim == Dim("a", 3) and type(dim.size) is int
