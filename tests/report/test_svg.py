"""Elements, scales and charts of SVG."""

import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.report.svg import (
    BARS_WIDTH,
    CURVES_HEIGHT,
    CURVES_WIDTH,
    DARK_STYLE,
    SERIES,
    Scale,
    Series,
    bar_chart,
    element,
    line_chart,
    scale_for,
    text,
    thinned,
    ticks,
)
from tests.report.drawings import SVG


@given(st.text(alphabet="ab&<>'\";#39"))
def test_text_reads_back_as_content_and_as_attribute(words):
    read = ET.fromstring(text(1, 2, words, data_words=words))
    assert (read.text or "") == read.get("data-words", "") == words


def test_lengths_have_two_decimals_at_most():
    assert element("rect", x=1, y=2.0, width=1 / 3, rx=-1e-9) == (
        "<rect x='1' y='2' width='0.33' rx='0'/>"
    )


def parsed(series, until=10, **options):
    return ET.fromstring(line_chart("a <title> & 'more'", series, until=until, **options))


def numbers(path):
    return [float(n) for n in path.replace("M", " ").replace("L", " ").replace("Z", " ").split()]


def test_a_curve_falls_where_its_values_do():
    svg = parsed([Series("training", [(n, 10.0 - n) for n in range(1, 11)])])
    (path,) = svg.findall(f"{SVG}path")
    coordinates = numbers(path.get("d"))
    x, y = coordinates[::2], coordinates[1::2]
    assert x == sorted(x) and y == sorted(y) and len(x) == 10
    assert 0 < min(x) and max(x) <= CURVES_WIDTH and 0 < min(y) and max(y) <= CURVES_HEIGHT


def test_curves_are_told_in_words():
    svg = parsed([Series("training", [(1, 5.0), (2, 1.0), (3, 2.0)]), Series("held out", [])])
    told = "training: 5 at step 1, 2 at step 3, lowest 1 at step 2; held out: no finite value"
    assert svg.find(f"{SVG}desc").text == told
    assert svg.find(f"{SVG}title").text == "a <title> & 'more'"
    assert svg.get("role") == "img" and told in svg.get("aria-label")


def test_missing_values_are_gaps():
    points = [(1, 1.0), (2, 1.0), (3, None), (4, 1.0), (5, 2.0)]
    assert len(parsed([Series("training", points)]).findall(f"{SVG}path")) == 2


def test_single_point_is_drawn():
    svg = parsed([Series("training", [(1, 1.0)]), Series("end", [(3, 2.0)], 2, marks=True)])
    points = [c for c in svg.findall(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    assert [point.get("class") for point in points] == ["f0", "s2"]


def test_long_curve_has_means_and_ranges():
    points = [(n, math.sin(n)) for n in range(100_000)]
    drawn = line_chart("long", [Series("training", points)], until=100_000)
    assert len(drawn) < 30_000
    svg = ET.fromstring(drawn)
    band, line = svg.findall(f"{SVG}path")
    assert band.get("fill-opacity") and not line.get("fill-opacity")
    # The range is that of all values, not of means.
    heights = numbers(band.get("d"))[1::2]
    assert max(heights) - min(heights) > 150


def test_means_are_of_equal_parts_and_do_not_overflow():
    assert thinned([(1, 1e308), (2, 1e308)], most=1) == [[(1.5, 1e308, 1e308, 1e308)]]
    (means,) = thinned([(n, 1.0) for n in range(1001)], most=100)
    assert len(means) == 91
    points = [(1, 1.0), (2, 3.0), (3, None), (4, None), (5, 4.0)]
    assert thinned(points, most=3) == [[(1.5, 2.0, 1.0, 3.0)], [(5.0, 4.0, 4.0, 4.0)]]


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
    assert [words.text for words in svg.findall(f"{SVG}text")].count("resumed") == 1


def test_every_look_has_light_and_dark_colours():
    for look, (light, dark) in enumerate(SERIES):
        svg = parsed([Series("training", [(1, 1.0), (2, 2.0)], look)])
        (path,) = svg.findall(f"{SVG}path")
        assert (path.get("class"), path.get("stroke")) == (f"s{look}", light)
        assert f".s{look} {{ stroke: {dark} }} .f{look} {{ fill: {dark} }}" in DARK_STYLE


def test_a_long_legend_takes_more_rows():
    series = [Series("n" * 30, [(1, 1.0), (2, 2.0)], look) for look in range(6)]
    short, long = parsed(series[:1]), parsed(series)
    names = [words for words in long.findall(f"{SVG}text") if words.text == "n" * 30]
    assert max(float(words.get("x")) for words in names) + 30 * 7 <= CURVES_WIDTH
    rows = {words.get("y") for words in names}
    assert len(rows) == 3 and int(long.get("height")) == int(short.get("height")) + 2 * 18
    (path,) = short.findall(f"{SVG}path")
    assert min(numbers(path.get("d"))[1::2]) + 36 == min(
        min(numbers(curve.get("d"))[1::2]) for curve in long.findall(f"{SVG}path")
    )


def test_doubling_numbers_are_at_equal_distances():
    svg = parsed([Series("a", [(n, 1.0 * n) for n in (4, 8, 16)])], until=16, is_doubling=True)
    x = numbers(svg.find(f"{SVG}path").get("d"))[::2]
    assert x[1] - x[0] == pytest.approx(x[2] - x[1], abs=0.2) and x[1] - x[0] > 100
    words = {words.text: float(words.get("x")) for words in svg.findall(f"{SVG}text")}
    for count, place in zip((4, 8, 16), x, strict=True):
        assert words[str(count)] == pytest.approx(place, abs=0.1)
    parsed([Series("a", [(4, 1.0)])], until=4, is_doubling=True)


def test_axis_of_curves_is_named():
    svg = parsed([Series("a", [(4, 1.0), (8, 2.0)])], axis="microbatch")
    assert "1 at microbatch 4, 2 at microbatch 8" in svg.get("aria-label")
    assert "microbatch" in [words.text for words in svg.findall(f"{SVG}text")]


def drawn(rows, names=(), **options):
    svg = ET.fromstring(bar_chart("a & b", rows, names, write="{:g} B".format, **options))
    found = [rect for rect in svg.findall(f"{SVG}rect") if rect.get("height") == "22"]
    return svg, [(float(rect.get("x")), float(rect.get("width"))) for rect in found]


def test_bars_are_adjacent_and_in_proportion():
    _, (one, two, three) = drawn([("x", [(0, 1.0), (1, 3.0)], "4"), ("y", [(0, 2.0)], "2")])
    assert one[0] == three[0] and two[0] == pytest.approx(sum(one))
    assert two[1] == pytest.approx(3 * one[1], abs=0.2)
    assert three[1] == pytest.approx(2 * one[1], abs=0.2)
    assert sum(two) <= BARS_WIDTH


def test_falling_rows_start_at_the_previous_end():
    rows = [("x", [(0, 5.0)], ""), ("y", [(1, -2.0)], ""), ("z", [(1, 1.0)], "")]
    _, (one, two, three) = drawn(rows, falling=True)
    assert sum(two) == pytest.approx(sum(one), abs=0.2)
    assert two[0] == pytest.approx(three[0], abs=0.2)


def test_bars_are_told_in_words():
    assert drawn([("x", [(0, 0.0)], "0")])[1][0][1] == 0
    svg, _ = drawn([("CPU:0", [(0, 1.0)], "1 B")], ["weights"])
    assert svg.find(f"{SVG}desc").text == "CPU:0: 1 B"
    titles = [rect.find(f"{SVG}title") for rect in svg.findall(f"{SVG}rect")]
    assert [t.text for t in titles if t is not None] == ["CPU:0, weights: 1 B"]


RANGES = [(0, 0), (3, 3), (-2, 5), (2.5, 7.1), (0.9, 1), (1e-5, 1e-3), (1, 1e30), (20, 700)]


@pytest.mark.parametrize(("low", "high"), [*RANGES, (-1e-9, 0), (1e200, 1e201)])
def test_all_values_lie_on_the_scale(low, high):
    scale = Scale.of([high, low])
    assert 0 <= scale.share(low) <= scale.share(high) <= 1 + 1e-9
    ticks = scale.ticks(6)
    assert 2 <= len(ticks) <= 13 and ticks == sorted(set(ticks))
    for tick in ticks:
        assert -1e-9 <= scale.share(tick) <= 1 + 1e-9
        # Round: at most two digits.
        assert math.isclose(float(f"{tick:.1e}"), tick, abs_tol=1e-12) or len(f"{tick:g}") <= 5


def test_scales_begin_at_0_or_are_logarithmic():
    scale = Scale.of([0.0, 1.9])
    assert scale.low == scale.ticks(6)[0] == 0 and scale.high > 1.9
    assert Scale.of([3.0, 8.0], from_zero=True) == Scale(0.0, 8.0)
    assert Scale.of([], from_zero=True).high > 0 and Scale.of([0.0], from_zero=True).high > 0
    assert Scale.of([1.0, 100.0]).logarithmic
    assert not Scale.of([0.0, 100.0]).logarithmic and not Scale.of([5.0, 9.0]).logarithmic


@given(st.floats(1e-6, 1e9), st.integers(1, 30))
def test_axis_ticks_are_few_round_and_within_the_end(end, at_most):
    marks = ticks(end, at_most)
    assert marks[0] == 0 and ticks(0.0, at_most) == [0.0]
    assert len(marks) <= at_most + 1
    assert marks[-1] <= end * (1 + 1e-6)
    if len(marks) > 1:
        step = marks[1]
        assert marks == pytest.approx([step * index for index in range(len(marks))])
        assert marks[-1] + step > end
        power = 10.0 ** math.floor(math.log10(step) + 1e-9)
        assert min(abs(step / power - factor) for factor in (1, 2, 5)) < 1e-6


CELL = st.tuples(st.integers(1, 30), st.integers(0, 8))


@given(st.lists(CELL, max_size=8), st.sampled_from([0, 0.0625, 0.25, 0.5]))
def test_scale_is_least_with_room_for_most_cells(cells, negligible):
    most = negligible * sum(time for _, time in cells)
    enough = [
        scale
        for scale in sorted(room / time for room, time in cells if time)
        if sum(time for room, time in cells if time and room / time > scale) <= most
    ]
    assert scale_for(iter(cells), negligible) == (enough[0] if enough else 0)
