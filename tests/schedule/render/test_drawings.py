"""What holds for all drawings: nothing is loaded, odd tables can be drawn, the dark is dark."""

import re
import xml.etree.ElementTree as ET

import pytest

from pipemesh.schedule import Costs, Schedule, forward_only, gpipe, simulate, zb_v
from pipemesh.schedule.render import memory_to_svg, to_html, to_svg, to_terminal, to_trace
from pipemesh.schedule.render.palette import BAND, EDGE, GRID, INK, MUTED, PAPER
from tests.schedule.render.drawings import SVG, contrast, pictures, uneven


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


@pytest.mark.parametrize("draw", [to_svg, to_html, memory_to_svg])
def test_drawings_are_self_contained_and_escape_their_title(draw):
    text = draw(simulate(zb_v(2, 4)), title="a <b> & 'c' \"d\"")
    assert "<b>" not in text
    assert "a &lt;b&gt; &amp;" in text
    links = re.findall(r"""(?:href|src|url)\s*[=(]\s*['"]?([^'")\s>]+)""", text)
    assert links == []
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
