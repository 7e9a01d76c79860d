"""The web page of a timeline."""

import re
import xml.etree.ElementTree as ET

import pytest

from pipemesh.schedule import Costs, simulate, zb_v
from pipemesh.schedule.render import to_html
from pipemesh.schedule.render.axis import number
from pipemesh.schedule.render.svg import LEFT
from tests.schedule.render.drawings import SVG, pictures, uneven


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
            re.findall(r"<t[hd]>(.*?)</t[hd]>", row)
            for row in re.findall(r"<tr>.*?</tr>", table, re.S)
        ]
        for table in re.findall(r"<table>.*?</table>", page, re.DOTALL)
    ]


def test_tables_and_path_say_what_the_timeline_says():
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
    columns = (
        timeline.busy,
        timeline.bubble,
        timeline.own_span_bubble,
        timeline.peak_activations,
    )
    for device, row in enumerate(devices[1:]):
        assert row == [str(device), *(number(column[device]) for column in columns)]
    path = re.search(r"<h2>Critical path</h2>\s*<p>(.*?)</p>", page)[1]
    assert path.split(" &rarr; ") == [str(span.action) for span in timeline.critical_path]


def test_predicted_and_measured_have_a_column_a_table_and_a_path_each():
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
