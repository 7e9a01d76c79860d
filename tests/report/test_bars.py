"""Bars on one scale."""

import xml.etree.ElementTree as ElementTree

import pytest

from pipemesh.report.bars import WIDTH, bars

SVG = "{http://www.w3.org/2000/svg}"


def drawn(rows, names=(), **options):
    svg = ElementTree.fromstring(bars("a & b", rows, names, text="{:g} B".format, **options))
    found = [rect for rect in svg.findall(f"{SVG}rect") if rect.get("height") == "22"]
    return svg, [(float(rect.get("x")), float(rect.get("width"))) for rect in found]


def test_parts_stand_side_by_side_and_lengths_are_in_proportion():
    _, (one, two, three) = drawn([("x", [(0, 1.0), (1, 3.0)], "4"), ("y", [(0, 2.0)], "2")])
    assert one[0] == three[0] and two[0] == pytest.approx(sum(one))
    assert two[1] == pytest.approx(3 * one[1], abs=0.2)
    assert three[1] == pytest.approx(2 * one[1], abs=0.2)
    assert sum(two) <= WIDTH


def test_falling_rows_begin_where_the_last_one_ended():
    rows = [("x", [(0, 5.0)], ""), ("y", [(1, -2.0)], ""), ("z", [(1, 1.0)], "")]
    _, (one, two, three) = drawn(rows, falling=True)
    assert sum(two) == pytest.approx(sum(one), abs=0.2)
    assert two[0] == pytest.approx(three[0], abs=0.2)


def test_it_is_told_in_words():
    svg, _ = drawn([("CPU:0", [(0, 1.0)], "1 B")], ["weights"])
    assert svg.find(f"{SVG}desc").text == "CPU:0: 1 B"
    titles = [rect.find(f"{SVG}title") for rect in svg.findall(f"{SVG}rect")]
    assert [t.text for t in titles if t is not None] == ["CPU:0, weights: 1 B"]


def test_nothing_is_drawn_of_nothing():
    assert drawn([("x", [(0, 0.0)], "0")])[1][0][1] == 0
