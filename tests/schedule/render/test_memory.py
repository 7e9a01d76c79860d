"""The plot of what devices hold."""

import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.schedule import Costs, one_f_one_b, simulate
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.render import memory_to_svg
from pipemesh.schedule.render.svg import LEFT
from tests.schedule.render.drawings import SVG


def test_memory_plot_has_a_panel_a_device():
    root = ET.fromstring(memory_to_svg(simulate(one_f_one_b(3, 6))))
    titles = [path.find(f"{SVG}title").text for path in root.findall(f".//{SVG}path")]
    assert titles == ["device 0: peak 3", "device 1: peak 2", "device 2: peak 1"]


@given(st.sampled_from(sorted(BUILDERS)), st.floats(2, 40))
def test_every_curve_is_that_of_its_device_on_one_vertical_scale(name, scale):
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
