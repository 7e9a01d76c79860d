"""The stage costs of partitions as an SVG picture."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipemesh.partition.result import Partition, layers_text
from pipemesh.report.svg import (
    filled,
    grid,
    line,
    picture,
    rect,
    stroked,
    text,
    text_width,
    ticks,
    tooltip,
)
from pipemesh.text import number_text

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 250, 74, 20, 46, 46
_MOST_LABELS = 24


def partition_to_svg(partitions: Mapping[str, Partition]) -> str:
    """Draws the stage costs of partitions by their titles, a panel each, all on one scale."""
    # Stages of the slowest devices are orange, the dashed line is the mean.
    top = max(max(partition.stage_costs) for partition in partitions.values()) or 1.0
    step = ticks(top, 5)[1]
    ceiling = math.ceil(top / step * (1 - 1e-9)) * step
    parts: list[str] = []
    descriptions: list[str] = []
    for index, (title, partition) in enumerate(partitions.items()):
        parts += _panel(title, partition, index * _PANEL, step, ceiling)
        costs = ", ".join(map(number_text, partition.stage_costs))
        descriptions.append(f"{title}: {_summary(partition)}; costs of its stages: {costs}")
    return picture(_WIDTH, _PANEL * len(partitions), "", parts, description="; ".join(descriptions))


def _summary(partition: Partition) -> str:
    return f"bottleneck {number_text(partition.bottleneck)}, balance {partition.balance:.3f}"


def _panel(title: str, partition: Partition, y: int, step: float, ceiling: float) -> list[str]:
    """Draws a bar for each stage, over round costs in steps up to the ceiling."""
    left, right = _LEFT, _WIDTH - _RIGHT
    floor, height = y + _PANEL - _BOTTOM, _PANEL - _TOP - _BOTTOM
    costs = [tick * step for tick in range(round(ceiling / step) + 1)]
    parts = [
        text(left, y + 22, title, font_size=14, font_weight="bold"),
        text(right, y + 22, _summary(partition), anchor="end", is_muted=True),
        *grid(left, right, [(floor - height * c / ceiling, number_text(c)) for c in costs]),
    ]
    slot = (right - left) / partition.num_stages
    gap = max(min(slot * 0.2, 8), slot - 110)
    devices = partition.device_costs
    slowest = {device for device, cost in enumerate(devices) if cost >= max(devices) * (1 - 1e-9)}
    has_few = partition.num_stages <= _MOST_LABELS
    every = math.ceil(partition.num_stages / _MOST_LABELS)
    for stage, cost in enumerate(partition.stage_costs):
        tall = height * cost / ceiling
        x = left + stage * slot
        layers = layers_text(partition.stages[stage])
        about = tooltip(f"stage {stage}: layers {layers}, cost {number_text(cost)}")
        look = filled(1 if partition.stage_devices[stage] in slowest else 0)
        parts.append(rect(x + gap / 2, floor - tall, slot - gap, tall, about, **look))
        middle = x + slot / 2
        if stage % every == 0:
            parts.append(text(middle, floor + 15, str(stage), anchor="middle"))
        if has_few and text_width(layers) < slot:
            parts.append(text(middle, floor + 28, layers, anchor="middle", is_muted=True))
    mean = floor - height * math.fsum(partition.stage_costs) / partition.num_stages / ceiling
    label = "stage (below: its layers)" if has_few else "stage"
    center, middle = (left + right) / 2, floor - height / 2
    turned = f"rotate(-90 14 {middle:g})"
    return [
        *parts,
        line(left, floor, right, floor),
        line(left, mean, right, mean, **(stroked(5) | {"stroke_dasharray": "5 4"})),
        text(center, floor + 42, f"{label}; dashed: mean", anchor="middle", is_muted=True),
        text(14, middle, "cost", anchor="middle", is_muted=True, transform=turned),
    ]
