"""Curves as pictures: what they show, and what they say to those who do not see them."""

import math
import xml.etree.ElementTree as ElementTree

import pytest

from pipemesh.report.chart import HEIGHT, MOST_RUNS, STYLE, WIDTH, Series, chart, thinned

SVG = "{http://www.w3.org/2000/svg}"


def parsed(series, until=10, **options):
    return ElementTree.fromstring(chart("a <title> & 'more'", series, until=until, **options))


def numbers(path):
    return [float(n) for n in path.replace("M", " ").replace("L", " ").replace("Z", " ").split()]


def test_a_curve_falls_where_its_values_do():
    svg = parsed([Series("training", [(n, 10.0 - n) for n in range(1, 11)])])
    (path,) = svg.findall(f"{SVG}path")
    coordinates = numbers(path.get("d"))
    x, y = coordinates[::2], coordinates[1::2]
    assert x == sorted(x) and y == sorted(y) and len(x) == 10
    assert 0 < min(x) and max(x) <= WIDTH and 0 < min(y) and max(y) <= HEIGHT


def test_it_is_told_in_words():
    svg = parsed([Series("training", [(1, 5.0), (2, 1.0), (3, 2.0)]), Series("held out", [])])
    told = "training: 5 at step 1, 2 at step 3, lowest 1 at step 2; held out: no finite value"
    assert svg.find(f"{SVG}desc").text == told
    assert svg.find(f"{SVG}title").text == "a <title> & 'more'"
    assert svg.get("role") == "img" and told in svg.get("aria-label")


def test_what_is_not_finite_is_a_gap():
    points = [(1, 1.0), (2, 1.0), (3, None), (4, 1.0), (5, 2.0)]
    assert len(parsed([Series("training", points)]).findall(f"{SVG}path")) == 2


def test_a_point_alone_is_seen():
    svg = parsed([Series("training", [(1, 1.0)]), Series("end", [(3, 2.0)], 2, marks=True)])
    assert [c.get("class") for c in svg.findall(f"{SVG}circle")][:2] == ["f0", "s2"]


def test_of_long_trainings_means_and_ranges_are_drawn():
    points = [(n, math.sin(n)) for n in range(100_000)]
    text = chart("long", [Series("training", points)], until=100_000)
    assert len(text) < 30_000
    svg = ElementTree.fromstring(text)
    band, line = svg.findall(f"{SVG}path")
    assert band.get("fill-opacity") and not line.get("fill-opacity")
    # The range is that of all values, not of means.
    heights = numbers(band.get("d"))[1::2]
    assert max(heights) - min(heights) > 150


def test_means_are_of_equal_parts_and_do_not_overflow():
    assert thinned([(1, 1e308), (2, 1e308)], most=1) == [(1.5, 1e308, 1e308, 1e308)]
    assert len(thinned([(n, 1.0) for n in range(1001)], most=100)) == 91


@pytest.mark.parametrize("values", [[0.0], [-1e30, 1e30], [1e300, 1e-300], []])
def test_odd_values_are_drawn(values):
    parsed([Series("training", list(enumerate(values)))], until=0)


def test_steps_are_marked():
    svg = parsed([Series("training", [(1, 1.0), (9, 2.0)])], notes=[(4, "resumed"), (6, "resumed")])
    marked = [line.find(f"{SVG}title") for line in svg.findall(f"{SVG}line")]
    assert [title.text for title in marked if title is not None] == [
        "resumed at step 4",
        "resumed at step 6",
    ]
    assert [text.text for text in svg.findall(f"{SVG}text")].count("resumed") == 1


def test_every_look_has_a_colour_in_light_and_in_the_dark():
    light, dark = STYLE.split("@media")
    for look in range(MOST_RUNS):
        for part in (light, dark):
            assert f".s{look} {{ stroke: #" in part and f".f{look} {{ fill: #" in part
