"""The picture of a timeline: everything is there, and nothing overlaps."""

import xml.etree.ElementTree as ET

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.schedule import Costs, gpipe, simulate
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.render import to_svg
from pipemesh.schedule.render.svg import LEFT, escape, fitting_scale
from tests.schedule.render.drawings import SVG


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


def test_tooltips_say_stage_microbatch_and_times():
    assert "<title>1B0: full backward" not in to_svg(
        simulate(gpipe(2, 1))
    ) and "<title>1B0: backward of stage 1, microbatch 0; device 1, time 2 to 4</title>" in to_svg(
        simulate(gpipe(2, 1))
    )


@settings(max_examples=40)
@given(st.sampled_from(sorted(BUILDERS)), st.floats(5, 50), st.floats(1, 2))
def test_a_given_scale_and_end_place_cells_and_axis(name, scale, longer):
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
def test_a_cell_shows_as_much_of_its_text_as_it_has_room_for(name, scale):
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


def test_the_scale_fits_the_text_but_no_more_than_the_widest():
    short, long = (simulate(build("gpipe", 2, m), Costs(1, 1)) for m in (2, 2000))
    # The narrowest cell is 24 pixels wide.
    assert fitting_scale([short]) == 24
    assert fitting_scale([long]) == pytest.approx(1500 / long.makespan)
    assert fitting_scale([long, short], width=100, widest=9000) == pytest.approx(
        9000 / long.makespan
    )
    assert fitting_scale([]) == fitting_scale([simulate(gpipe(1, 1), Costs(0, 0))]) == 1


@given(st.text(alphabet="ab&<>'\";#39"))
def test_escaped_text_reads_back_as_content_and_as_attribute(text):
    for quote in "'\"":
        read = ET.fromstring(f"<a b={quote}{escape(text)}{quote}>{escape(text)}</a>")
        assert (read.text or "") == read.get("b") == text
