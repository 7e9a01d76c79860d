"""Column tables, numbers, and what somebody who misspelt a word may have meant."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.text import (
    almost_equal,
    bytes_of,
    bytes_text,
    columns,
    did_you_mean,
    nearest,
    nearest_text,
    number,
    short,
)

CELLS = st.text("abc1.", max_size=6)


@given(st.integers(1, 4).flatmap(lambda n: st.lists(st.tuples(*[CELLS] * n), min_size=1)))
def test_cells_of_a_column_begin_or_end_at_one_place(rows):
    for left in (range(4), ()):
        ends = set()
        for row, line in zip(rows, columns(rows, left), strict=True):
            assert line == line.rstrip()
            width = max(len(other[0]) for other in rows)
            cell = line[:width].ljust(width)
            assert cell == (row[0].ljust(width) if left else row[0].rjust(width))
            ends.add(len(line))
        assert max(ends) <= sum(max(map(len, c)) + 2 for c in zip(*rows, strict=True))


def test_rows_of_unequal_length_are_an_error():
    with pytest.raises(ValueError, match="zip"):
        columns([["a", "b"], ["c"]])


@pytest.mark.parametrize(
    ("word", "meant"), [("gpip", "gpipe"), ("zb_w", "zb_v"), ("", None), ("entirely", None)]
)
def test_the_nearest_word(word, meant):
    known = ("gpipe", "zb_v")
    assert nearest(word, known) == meant
    assert did_you_mean(word, known) == ("" if meant is None else f"did you mean {meant!r}? ")
    assert nearest_text(word, known).endswith("nown: 'gpipe', 'zb_v'")


def test_only_a_slip_of_the_pen_is_almost_equal():
    assert almost_equal("bacth", ["batch"]) == "batch"
    assert almost_equal("dim_in", ["dim_out"]) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [("16GiB", 16 * 2**30), ("80 GB", 80e9), ("1e6", 1e6), ("3k", 3000), ("1.5mib", 1.5 * 2**20)],
)
def test_bytes_have_units(text, number):
    assert bytes_of(text) == number


@pytest.mark.parametrize(("text", "told"), [("3XB", "has the unit 'XB'"), ("GB", "no number")])
def test_what_are_no_bytes_is_said(text, told):
    with pytest.raises(ValueError, match=told):
        bytes_of(text)


@pytest.mark.parametrize(
    ("value", "told"),
    [(0.0, "0"), (1e-5, "1e-05"), (999.96, "1000"), (5e6, "5M"), (3e9, "3G"), (1e15, "1e+15")],
)
def test_numbers_are_short(value, told):
    assert short(value) == told


@given(st.floats(-1e12, 1e12))
def test_numbers_have_four_digits_without_trailing_zeros(value):
    text = number(value)
    assert float(text) == pytest.approx(value, rel=5.01e-4)
    mantissa = text.partition("e")[0]
    assert "." not in mantissa or not mantissa.endswith("0")
    if abs(value) < 999:
        assert len(mantissa.strip("-").lstrip("0.").replace(".", "")) <= 4


@pytest.mark.parametrize(
    ("number", "up", "text"),
    [
        (0, False, "0 B"),
        (1023, False, "1023 B"),
        (18.21 * 2**30, True, "18.3 GiB"),
        (18.21 * 2**30, False, "18.2 GiB"),
        (16 * 2**30, True, "16.0 GiB"),
        (2**41, False, "2.0 TiB"),
    ],
)
def test_bytes(number, up, text):
    assert bytes_text(number, up) == text
