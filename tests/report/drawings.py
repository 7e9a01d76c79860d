"""Helpers for tests of drawings."""

import re
import xml.etree.ElementTree as ET

from pipemesh.schedule import Costs, Timeline, simulate
from pipemesh.schedule.builders import build

SVG = "{http://www.w3.org/2000/svg}"


def contrast(one, two):
    def luminance(colour):
        parts = [c / 255 for c in colour]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    light, dark = sorted((luminance(one), luminance(two)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


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
