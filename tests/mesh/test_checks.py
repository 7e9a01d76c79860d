"""Checks of names, pairs and sizes."""

import keyword
import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import ShapeError
from pipemesh.mesh.checks import is_name, pairs_of, text_of, whole_number


@given(st.text(alphabet="a_Z09 \n:;-éª٣", max_size=4))
def test_names_are_what_python_calls_so_in_ascii(text):
    assert is_name(text) == (text.isidentifier() and text.isascii())


def test_python_keeps_no_word_for_itself_here():
    assert all(map(is_name, keyword.kwlist))
    assert [c for c in string.printable if is_name(c)] == [*string.ascii_letters, "_"]
    assert not any(map(is_name, (None, 3, b"a", ["a"])))


@given(st.integers())
def test_a_whole_number_of_numpy_becomes_one_of_python(number):
    assert whole_number(number) == number
    if abs(number) < 2**31:
        for kind in (np.int64, np.int32):
            assert type(whole_number(kind(number))) is int


@pytest.mark.parametrize("value", [2.0, np.float32(2), float("nan"), True, False, "2", None, [2]])
def test_what_is_no_whole_number_is_none(value):
    assert whole_number(value) is None


@pytest.mark.parametrize(
    ("value", "pairs"),
    [
        ((), []),
        ([("a", 1), ["b", 2]], [("a", 1), ("b", 2)]),
        ("ab", None),  # Nor are its letters pairs.
        (["ab"], None),
        ({"a": 1}, None),
        (None, None),
        ([("a", 1), ("b",)], None),
        ([("a", 1, 2)], None),
    ],
)
def test_pairs_are_lists_or_tuples_of_two(value, pairs):
    assert pairs_of(value) == pairs


def test_what_is_no_text_is_the_callers_error_with_an_example():
    assert text_of("heads:8", ShapeError, "b:2") == "heads:8"
    for value in (None, 8, b"heads:8"):
        with pytest.raises(ShapeError) as error:
            text_of(value, ShapeError, "b:2")
        assert str(error.value) == f"{value!r} is no text; write for example 'b:2'"
