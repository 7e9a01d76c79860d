"""The picture of a partition: a bar for each stage, and few labels."""

import xml.etree.ElementTree as ET

import pytest

from pipemesh.partition import partition
from pipemesh.report.partition_drawing import partition_to_svg
from tests.report.drawings import SVG


@pytest.mark.parametrize("stages", [1, 4, 200])
def test_every_stage_has_a_bar_and_few_have_labels(stages):
    found = partition([1.5, 2, 0.25] * 100, stages)
    picture = ET.fromstring(partition_to_svg({"exact <&>": found}))
    bars = [rect for rect in picture.iter(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    assert len(bars) == stages
    assert all(float(bar.get("height")) > 0 and float(bar.get("width")) > 0 for bar in bars)
    labels = [text.text for text in picture.iter(f"{SVG}text")]
    assert "exact <&>" in labels
    assert "cost" in labels
    assert len(labels) < 70


def test_panels_share_one_scale():
    costs = [1, 1, 1, 5]
    plans = {name: partition(costs, 2, method=name) for name in ("exact", "lingvo")}
    picture = ET.fromstring(partition_to_svg(plans))
    assert picture.get("height") == "500"
