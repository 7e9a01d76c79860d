"""Pictures and pages of timelines: everything is drawn, readable, and to scale."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.report import memory_to_svg, to_html, to_svg, to_terminal, to_trace
from pipemesh.report.schedule_drawing import LEFT, fill, fitting_scale, ink, levels
from pipemesh.report.svg import BAND, EDGE, GRID, INK, MUTED, PAPER
from pipemesh.schedule import Costs, Schedule, forward_only, gpipe, one_f_one_b, simulate, zb_v
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.text import number
from tests.report.drawings import SVG, contrast, pictures, uneven


@settings(max_examples=40)
@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.floats(0.1, 300))
def test_every_action_is_drawn_once_without_overlap(name, num_devices, unit):
    timeline = simulate(
        build(name, num_devices, 2 * num_devices), Costs(unit, 2 * unit, unit, unit, unit / 7)
    )
    root = ET.fromstring(to_svg(timeline))
    width = float(root.get("width"))
    cells = root.findall(f".//{SVG}rect[@class='cell']")
    titles = [cell.find(f"{SVG}title").text for cell in cells]
    actions = [str(action) for row in timeline.schedule.rows for action in row]
    assert [title.split(":")[0] for title in titles] == actions
    right = {}
    for cell in cells:
        x, y, w = (float(cell.get(key)) for key in ("x", "y", "width"))
        assert x >= right.get(y, 0) - 0.02
        assert x + w <= width
        right[y] = x + w
    for text in root.findall(f".//{SVG}text"):
        assert 0 <= float(text.get("x")) <= width


def test_tooltips_say_stage_microbatch_and_times():
    told = "<title>1B0: backward of stage 1, microbatch 0; device 1, time 2 to 4</title>"
    assert told in to_svg(simulate(gpipe(2, 1)))


@settings(max_examples=40)
@given(st.sampled_from(sorted(BUILDERS)), st.floats(5, 50), st.floats(1, 2))
def test_scale_and_end_place_cells_and_axis(name, scale, longer):
    timeline = simulate(build(name, 2, 4), Costs(1, 3, 1, 2, 0.25))
    until = timeline.makespan * longer
    root = ET.fromstring(to_svg(timeline, scale=scale, until=until))
    cells = root.findall(f".//{SVG}rect[@class='cell']")
    for cell, span in zip(cells, timeline.spans(), strict=True):
        x, width = float(cell.get("x")), float(cell.get("width"))
        assert x == pytest.approx(LEFT + span.start * scale, abs=0.01)
        assert width == pytest.approx((span.end - span.start) * scale, abs=0.01)
    axis = root.findall(f"{SVG}line[@class='axis']")[0]
    assert float(axis.get("x2")) == pytest.approx(LEFT + until * scale, abs=0.1)


@settings(max_examples=40)
@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 40))
def test_cell_shows_the_text_that_fits(name, scale):
    timeline = simulate(build(name, 2, 4), Costs(1, 3, 1, 2, 0.25))
    root = ET.fromstring(to_svg(timeline, scale=float(scale)))
    groups = [group for group in root.findall(f"{SVG}g") if group.get("class") is None]
    for group, span in zip(groups, timeline.spans(), strict=True):
        text = group.find(f"{SVG}text")
        room = (span.end - span.start) * scale - 2
        action = span.action
        need = {f"{action.kind}{action.microbatch}": 18 if action.kind == "W" else 14}
        need |= {str(action.microbatch): 7}
        fits = [label for label, pixels in need.items() if pixels <= room]
        assert (text.text if text is not None else None) == (fits[0] if fits else None)


def test_scale_fits_text_up_to_the_widest():
    short, long = (simulate(build("gpipe", 2, m), Costs(1, 1)) for m in (2, 500))
    # The narrowest cell is 24 pixels wide.
    assert fitting_scale([short]) == 24
    assert fitting_scale([long]) == pytest.approx(1500 / long.makespan)
    assert fitting_scale([long, short], width=100, widest=9000) == pytest.approx(
        9000 / long.makespan
    )
    assert fitting_scale([]) == fitting_scale([simulate(gpipe(1, 1), Costs(0, 0))]) == 1


def test_memory_plot_has_a_panel_for_each_device():
    root = ET.fromstring(memory_to_svg(simulate(one_f_one_b(3, 6))))
    titles = [path.find(f"{SVG}title").text for path in root.findall(f".//{SVG}path")]
    assert titles == ["device 0: peak 3", "device 1: peak 2", "device 2: peak 1"]


@settings(max_examples=40)
@given(st.sampled_from(sorted(BUILDERS)), st.floats(2, 40))
def test_memory_curves_follow_activations_on_one_scale(name, scale):
    timeline = simulate(build(name, 3, 6), Costs(1, 3, 1, 2, 0.25))
    root = ET.fromstring(memory_to_svg(timeline, scale=scale))
    curves = root.findall(f".//{SVG}path")
    peaks = [float(line.get("y1")) for line in root.findall(f"{SVG}line[@stroke-dasharray]")]
    unit = None
    for device, (curve, peak) in enumerate(zip(curves, peaks, strict=True)):
        begin, *steps, end = re.findall(r"[MH]([0-9.]+)[ V]([0-9.]+)", curve.get("d"))
        floor = float(begin[1])
        unit = unit or (floor - peak) / timeline.peak_activations[device]
        expected = timeline.activations(device)
        for (x, y), (time, held) in zip(steps, expected, strict=True):
            assert float(x) == pytest.approx(LEFT + time * scale, abs=0.06)
            assert floor - float(y) == pytest.approx(held * unit, abs=0.2)
        assert float(end[0]) == pytest.approx(LEFT + timeline.makespan * scale, abs=0.06)
        assert float(end[1]) == floor


def test_predicted_and_measured_are_drawn_on_one_scale():
    predicted, measured = uneven()
    drawn = pictures(to_html(predicted, measured=measured))
    assert len({picture.get("width") for picture in drawn[:2]}) == 1
    ends = []
    for picture in drawn[:2]:
        cells = picture.findall(f".//{SVG}rect[@class='cell']")
        ends.append(max(float(c.get("x")) + float(c.get("width")) for c in cells))
    assert (ends[1] - LEFT) / (ends[0] - LEFT) == pytest.approx(1.09, abs=0.002)
    memory = max(float(x) for x in re.findall(r"H([0-9.]+)V", ET.tostring(drawn[2], "unicode")))
    assert memory == pytest.approx(ends[0], abs=0.2)


def tables(page):
    """For each table its rows of cells."""
    return [
        [
            re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)
            for row in re.findall(r"<tr>.*?</tr>", table, re.S)
        ]
        for table in re.findall(r"<table>.*?</table>", page, re.DOTALL)
    ]


def test_tables_and_path_follow_the_timeline():
    timeline = simulate(zb_v(2, 4), Costs(1, None, 2, 1, 0.5))
    page = to_html(timeline)
    summary, devices = tables(page)
    bubble, ratio = timeline.total_bubble, timeline.bubble_ratio
    assert summary == [
        ["devices", "2"],
        ["stages", "4"],
        ["microbatches", "4"],
        ["makespan", number(timeline.makespan)],
        ["bubble, all devices", f"{number(bubble)} ({ratio:.1%})"],
        ["largest own-span bubble", number(max(timeline.own_span_bubble))],
        ["peak activations", str(max(timeline.peak_activations))],
    ]
    columns = timeline.busy, timeline.bubble, timeline.own_span_bubble, timeline.peak_activations
    for device, row in enumerate(devices[1:]):
        assert row == [str(device), *(number(column[device]) for column in columns)]
    path = re.search(r"<h2>Critical path</h2>\s*<p>(.*?)</p>", page)[1]
    assert path.split(" &rarr; ") == [str(span.action) for span in timeline.critical_path]


def test_page_has_column_table_and_path_for_each_timeline():
    predicted = simulate(zb_v(2, 4))
    measured = simulate(zb_v(2, 4), Costs(1, None, 3, 1, 0.5))
    page = to_html(predicted, measured=measured)
    summary, first, second = tables(page)
    assert summary[0] == ["", "predicted", "measured"]
    makespans = [number(timeline.makespan) for timeline in (predicted, measured)]
    assert ["makespan", *makespans] in summary
    paths = re.findall(r"<h2>Critical path, .*</h2>\s*<p>(.*?)</p>", page)
    parts = zip((predicted, measured), (first, second), paths, pictures(page)[:2], strict=True)
    for timeline, devices, path, picture in parts:
        assert devices[1][1] == number(timeline.busy[0])
        assert path.split(" &rarr; ") == [str(span.action) for span in timeline.critical_path]
        axis = picture.findall(f"{SVG}line[@class='axis']")[0]
        cells = picture.findall(f".//{SVG}rect[@class='cell']")
        end = max(float(cell.get("x")) + float(cell.get("width")) for cell in cells)
        assert float(axis.get("x2")) >= end - 0.1
    assert len(set(paths)) == 2


def test_later_stages_of_a_device_are_paler():
    assert levels((0, 1, 0, 1, 0, 1)) == (0, 0, 0.5, 0.5, 1, 1)


@pytest.mark.parametrize("rgb", [(1, 1, 1), (1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 0)])
def test_ink_has_the_higher_contrast(rgb):
    """On any colour the better of black and white has 4.5, which is WCAG's level AA."""
    for value in range(256):
        background = tuple(value * part for part in rgb)
        black, white = (contrast(background, (grey,) * 3) for grey in (0, 255))
        assert ink(background) == ("#000000" if black > white else "#ffffff")


def test_paler_is_nearer_to_white_in_every_part():
    for kind in "FBIW":
        steps = [fill(kind, level / 8) for level in range(9)]
        for part in zip(*steps, strict=True):
            assert list(part) == sorted(part)
            # Six tenths of the way.
            assert part[-1] - part[0] == pytest.approx(0.6 * (255 - part[0]), abs=0.5)


def test_brief_actions_are_visible_but_do_not_set_the_scale():
    predicted, measured = uneven()
    page = to_html(predicted, measured=measured)
    assert all(float(picture.get("width")) <= 1232 for picture in pictures(page))
    cells = pictures(page)[0].findall(f".//{SVG}rect[@class='cell']")
    brief = [cell for cell in cells if re.match("0I|3W", cell.find(f"{SVG}title").text)]
    assert len(brief) == 32
    # Nothing follows the last one, so it may be as wide as it takes to be seen.
    assert [cell.get("width") for cell in brief] == ["0.2"] * 31 + ["1"]
    assert float(ET.fromstring(to_svg(predicted)).get("width")) <= 1500 + 300
    assert max(map(len, to_terminal(predicted).splitlines())) < 500


@pytest.mark.parametrize("draw", [to_svg, memory_to_svg, to_html])
def test_black_and_white_parts_have_dark_colours(draw):
    picture = pictures(draw(simulate(zb_v(2, 4))))[0]
    style = picture.find(f"{SVG}style").text
    dark = dict(re.findall(r"\.(\w+) { (?:fill|stroke): (#\w+) }", style))
    for part in picture.iter():
        if part.get("pointer-events"):
            continue  # Text on a cell, whose colour stays.
        for attribute in ("fill", "stroke"):
            if part.get(attribute) in {INK, PAPER, MUTED, GRID, BAND, EDGE}:
                assert part.get("class") in dark, ET.tostring(part)
    paper = to_rgb(dark["paper"])
    assert min(contrast(to_rgb(dark[name]), paper) for name in ("ink", "muted")) >= 4.5
    assert contrast(to_rgb(dark["axis"]), paper) >= 3


def to_rgb(colour):
    return tuple(int(colour[i : i + 2], 16) for i in (1, 3, 5))


@pytest.mark.parametrize("draw", [to_svg, to_html, memory_to_svg])
def test_drawings_are_self_contained_and_escape_their_title(draw):
    text = draw(simulate(zb_v(2, 4)), title="a <b> & 'c' \"d\"")
    assert "<b>" not in text
    assert "a &lt;b&gt; &amp;" in text
    links = re.findall(r"""(?:href|src|url)\s*[=(]\s*['"]?([^'")\s>]+)""", text)
    # An icon without content, so that no browser asks for one.
    assert set(links) <= {"data:,"}
    assert set(re.findall(r"https?://[^'\"<\s]+", text)) <= {"http://www.w3.org/2000/svg"}


@pytest.mark.parametrize("draw", [to_svg, to_html, memory_to_svg, to_terminal, to_trace])
def test_odd_schedules_can_be_drawn(draw):
    for timeline in (
        simulate(forward_only(1, 1)),
        simulate(gpipe(1, 1), Costs(0, 0)),
        simulate(Schedule.from_text("0: 0F0 0B0\n1:\n")),
        simulate(gpipe(12, 3), Costs(1e-6, 1e6)),
    ):
        assert draw(timeline)
