"""The drawings as data: everything is there, nothing overlaps, nothing is loaded."""

import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    Schedule,
    Timeline,
    forward_only,
    gpipe,
    one_f_one_b,
    simulate,
    zb_v,
)
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.render import memory_to_svg, to_html, to_svg, to_terminal, to_trace
from pipemesh.schedule.render.axis import ticks
from pipemesh.schedule.render.palette import (
    BAND,
    EDGE,
    GRID,
    INK,
    MUTED,
    PAPER,
    fill,
    ink,
    levels,
)
from pipemesh.schedule.render.svg import LEFT

SVG = "{http://www.w3.org/2000/svg}"


def contrast(one, two):
    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("kind", "FBIW")
@pytest.mark.parametrize("level", [0, 0.25, 0.5, 1])
def test_text_on_every_colour_is_readable(kind, level):
    background = fill(kind, level)
    text = (0, 0, 0) if ink(background) == "#000000" else (255, 255, 255)
    assert contrast(background, text) >= 4.5  # WCAG level AA.


def test_later_stages_of_a_device_are_paler():
    assert levels((0, 1, 0, 1, 0, 1)) == (0, 0, 0.5, 0.5, 1, 1)


@given(st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.floats(0.1, 300))
def test_svg_has_every_action_once_at_its_place(name, num_devices, unit):
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


def uneven(slower=1.09):
    """Predicted and measured, with a first stage whose actions take a hundredth of the others'."""
    costs = Costs([0.2, 14, 14, 19], None, [0.2, 16, 16, 30], [9, 14, 14, 0.2])
    predicted = simulate(build("zb_h1", 4, 16), costs)
    times = (
        tuple(tuple(time * slower for time in row) for row in rows)
        for rows in (predicted.starts, predicted.ends)
    )
    return predicted, Timeline(predicted.schedule, costs, *times)


def pictures(page):
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", page, re.DOTALL)]


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


def test_brief_actions_do_not_set_the_scale_and_are_still_seen():
    predicted, measured = uneven()
    page = to_html(predicted, measured=measured)
    assert all(float(picture.get("width")) <= 1232 for picture in pictures(page))
    cells = pictures(page)[0].findall(f".//{SVG}rect[@class='cell']")
    brief = [cell for cell in cells if re.match("0I|3W", cell.find(f"{SVG}title").text)]
    assert len(brief) == 32
    # Nothing follows the last one, so it may be as wide as it takes to be seen.
    assert [cell.get("width") for cell in brief] == ["0.20"] * 31 + ["1.00"]
    assert float(ET.fromstring(to_svg(predicted)).get("width")) <= 1500 + 300
    assert max(map(len, to_terminal(predicted).splitlines())) < 500


@pytest.mark.parametrize("draw", [to_svg, memory_to_svg, to_html])
def test_everything_drawn_in_black_or_white_has_another_colour_in_the_dark(draw):
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


def test_tooltips_say_stage_microbatch_and_times():
    assert "<title>1B0: full backward" not in to_svg(
        simulate(gpipe(2, 1))
    ) and "<title>1B0: backward of stage 1, microbatch 0; device 1, time 2 to 4</title>" in to_svg(
        simulate(gpipe(2, 1))
    )


@pytest.mark.parametrize("draw", [to_svg, to_html, memory_to_svg])
def test_drawings_are_self_contained_and_escape_their_title(draw):
    text = draw(simulate(zb_v(2, 4)), title="a <b> & 'c' \"d\"")
    assert "<b>" not in text
    assert "a &lt;b&gt; &amp;" in text
    links = re.findall(r"""(?:href|src|url)\s*[=(]\s*['"]?([^'")\s>]+)""", text)
    assert links == []
    assert set(re.findall(r"https?://[^'\"<\s]+", text)) <= {"http://www.w3.org/2000/svg"}


def test_memory_plot_has_a_panel_a_device():
    root = ET.fromstring(memory_to_svg(simulate(one_f_one_b(3, 6))))
    titles = [path.find(f"{SVG}title").text for path in root.findall(f".//{SVG}path")]
    assert titles == ["device 0: peak 3", "device 1: peak 2", "device 2: peak 1"]


def test_trace_is_what_trace_viewers_read():
    timeline = simulate(zb_v(2, 4), Costs(transfer=0.5))
    trace = json.loads(to_trace(timeline, microseconds=10))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event, span in zip(slices, timeline.spans(), strict=True):
        assert event["name"] == str(span.action)
        assert (event["tid"], event["ts"]) == (span.device, pytest.approx(span.start * 10))
        assert event["dur"] == pytest.approx((span.end - span.start) * 10)
        assert event["args"] == {"stage": span.action.stage, "microbatch": span.action.microbatch}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]
    held = [e["args"]["held"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(held) == max(timeline.peak_activations)


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_terminal_table_is_to_scale():
    text = to_terminal(simulate(one_f_one_b(2, 2), Costs(1, 2)))
    assert text == (
        "device 0 |0F0 0F1         0B0----     0B1----\ndevice 1 |    1F0 1B0---- 1F1 1B1----"
    )


def test_terminal_colours_change_nothing_but_colours():
    timeline = simulate(zb_v(3, 6))
    colored = to_terminal(timeline, color=True)
    assert "\x1b[48;2;0;114;178;97m0F0\x1b[0m" in colored
    assert plain(colored) == to_terminal(timeline)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(40, 200), st.floats(0.1, 3)
)
def test_terminal_table_keeps_within_its_width(name, num_devices, width, forward):
    timeline = simulate(build(name, num_devices, 2 * num_devices), Costs(forward, transfer=0.3))
    for color in (False, True):
        lines = plain(to_terminal(timeline, color=color, width=width)).splitlines()
        assert len(lines) == num_devices
        assert max(map(len, lines)) <= width


def test_too_narrow_a_terminal_is_an_error():
    with pytest.raises(ScheduleError, match="width is 10; a table needs at least 30"):
        to_terminal(simulate(gpipe(1, 1)), width=10)


@pytest.mark.parametrize("draw", [to_svg, to_html, memory_to_svg, to_terminal, to_trace])
def test_odd_schedules_can_be_drawn(draw):
    for timeline in (
        simulate(forward_only(1, 1)),
        simulate(gpipe(1, 1), Costs(0, 0)),
        simulate(Schedule.from_text("0: 0F0 0B0\n1:\n")),
        simulate(gpipe(12, 3), Costs(1e-6, 1e6)),
    ):
        assert draw(timeline)


@given(st.floats(1e-6, 1e9), st.integers(1, 30))
def test_axis_ticks_are_few_round_and_within_the_end(end, at_most):
    marks = ticks(end, at_most)
    assert marks[0] == 0
    assert len(marks) <= at_most + 1
    assert marks[-1] <= end * (1 + 1e-6)
