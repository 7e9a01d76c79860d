"""Stage costs as a picture: SVG text that needs no library to make and no network to show."""

from __future__ import annotations

import math
from collections.abc import Mapping
from xml.sax.saxutils import escape

from pipemesh.partition.result import Partition
from pipemesh.partition.text import layers_text, number_text

_WIDTH, _PANEL, _LEFT, _RIGHT, _TOP, _BOTTOM = 860, 250, 74, 20, 46, 46
_MOST_LABELS = 24


def svg(plans: Mapping[str, Partition], unit: str = "") -> str:
    """Draws the stage costs of partitions, one panel each, all on one scale.

    Args:
        plans: a title for each partition.
        unit: of the costs, for the axis.

    Returns:
        An SVG document. Stages of the slowest devices are red, the dashed line is the mean.
    """
    top = max(max(plan.stage_costs) for plan in plans.values()) or 1.0
    step = _tick_step(top)
    ceiling = math.ceil(top / step * (1 - 1e-9)) * step
    height = _PANEL * len(plans)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" font-family="Helvetica, Arial, sans-serif" '
        'font-size="12" role="img">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
    ]
    for index, (title, plan) in enumerate(plans.items()):
        lines += _panel(title, plan, index * _PANEL, step, ceiling, unit)
    lines.append("</svg>")
    return "\n".join(lines) + "\n"


def _tick_step(top: float) -> float:
    """A round step that puts three to six ticks below the top."""
    power = 10.0 ** math.floor(math.log10(top / 4))
    return next(factor * power for factor in (1, 2, 2.5, 5, 10) if top / (factor * power) <= 5)


def _panel(
    title: str, plan: Partition, y: int, step: float, ceiling: float, unit: str
) -> list[str]:
    left, right = _LEFT, _WIDTH - _RIGHT
    base, height = y + _PANEL - _BOTTOM, _PANEL - _TOP - _BOTTOM
    lines = [
        f'<text x="{left}" y="{y + 22}" font-size="14" font-weight="bold" fill="#222222">'
        f"{escape(title)}</text>",
        f'<text x="{right}" y="{y + 22}" text-anchor="end" fill="#555555">'
        f"bottleneck {number_text(plan.bottleneck)}, balance {plan.balance:.3f}</text>",
    ]
    for tick in range(round(ceiling / step) + 1):
        level = base - height * tick * step / ceiling
        color = "#888888" if tick == 0 else "#e4e4e4"
        lines.append(
            f'<line x1="{left}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}" stroke="{color}"/>'
        )
        lines.append(
            f'<text x="{left - 8}" y="{level + 4:.1f}" text-anchor="end" fill="#555555">'
            f"{number_text(tick * step)}</text>"
        )
    slot = (right - left) / plan.num_stages
    gap = max(min(slot * 0.2, 8), slot - 110)
    devices = plan.device_costs
    slowest = {device for device, cost in enumerate(devices) if cost >= max(devices) * (1 - 1e-9)}
    few = plan.num_stages <= _MOST_LABELS
    every = math.ceil(plan.num_stages / _MOST_LABELS)
    for stage, cost in enumerate(plan.stage_costs):
        tall = height * cost / ceiling
        x = left + stage * slot
        color = "#c8442f" if plan.stage_devices[stage] in slowest else "#3b76af"
        layers = layers_text(plan.stages[stage])
        lines.append(
            f'<rect x="{x + gap / 2:.2f}" y="{base - tall:.2f}" width="{slot - gap:.2f}" '
            f'height="{tall:.2f}" fill="{color}"><title>stage {stage}: layers {layers}, cost '
            f"{number_text(cost)}</title></rect>"
        )
        if stage % every == 0:
            lines.append(
                f'<text x="{x + slot / 2:.1f}" y="{base + 15}" text-anchor="middle" '
                f'fill="#222222">{stage}</text>'
            )
        # About six pixels a digit, as far as they fit side by side.
        if few and len(layers) * 5.5 < slot:
            lines.append(
                f'<text x="{x + slot / 2:.1f}" y="{base + 28}" text-anchor="middle" '
                f'font-size="10" fill="#777777">{layers}</text>'
            )
    mean = math.fsum(plan.stage_costs) / plan.num_stages
    level = base - height * mean / ceiling
    lines.append(
        f'<line x1="{left}" x2="{right}" y1="{level:.1f}" y2="{level:.1f}" stroke="#222222" '
        'stroke-dasharray="5 4"/>'
    )
    label = "stage (below: its layers)" if few else "stage"
    lines.append(
        f'<text x="{(left + right) / 2}" y="{base + 42}" text-anchor="middle" fill="#555555">'
        f"{label}; dashed: mean</text>"
    )
    axis = f"cost ({unit})" if unit else "cost"
    middle = base - height / 2
    lines.append(
        f'<text x="14" y="{middle}" text-anchor="middle" fill="#555555" '
        f'transform="rotate(-90 14 {middle})">{escape(axis)}</text>'
    )
    return lines
