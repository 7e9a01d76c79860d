"""Partitions as tables with bars."""

from __future__ import annotations

import math
from collections.abc import Mapping

from pipemesh.partition.result import Partition
from pipemesh.text import columns

_BAR_WIDTH = 30
_MOST_ROWS = 64


def bytes_text(number: float, up: bool = False) -> str:
    """Writes a number of bytes.

    Args:
        number: of bytes.
        up: round up and not to the nearest, where the number is a need.

    Returns:
        For example `"18.2 GiB"`.
    """
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if number >= 2**power:
            scaled = number / 2**power
            return f"{math.ceil(scaled * 10 - 1e-6) / 10 if up else scaled:.1f} {unit}"
    return f"{math.ceil(number) if up else number:g} B"


def count_text(number: int, what: str) -> str:
    """Writes a number of things.

    Args:
        number: how many.
        what: one of them, in English with a plural in s.

    Returns:
        For example `"1 stage"` or `"2 stages"`.
    """
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def number_text(number: float) -> str:
    """Writes a cost with four digits.

    Args:
        number: the cost.

    Returns:
        For example `"12.35"`.
    """
    if number == int(number) and abs(number) < 1e9:
        return str(int(number))
    return f"{number:.4g}" if not 1e3 <= abs(number) < 1e6 else f"{number:.1f}"


def bar(share: float, block: str = "█") -> str:
    """Draws a bar.

    Args:
        share: from 0 to 1 of the full width.
        block: what to draw it with.

    Returns:
        The bar; something above zero is at least one block.
    """
    return block * max(round(share * _BAR_WIDTH), 1 if share > 0 else 0)


def layers_text(layers: range) -> str:
    """Writes the layers of a stage.

    Args:
        layers: the layer indices.

    Returns:
        For example `"4-7"`, or `"-"` for an empty stage.
    """
    if not layers:
        return "-"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"


def table(plan: Partition, block: str = "█") -> str:
    """Draws a partition as a table, one row a stage.

    Args:
        plan: the partition. Of more than 64 stages, the first and last ones and the most
            expensive one are shown.
        block: what to draw bars with.

    Returns:
        Lines of text.
    """
    worst = max(range(plan.num_stages), key=lambda stage: plan.stage_costs[stage])
    top = plan.stage_costs[worst] or 1.0
    shared = plan.num_virtual_stages > 1
    head = ["stage", *(["device"] if shared else []), "layers", "count", "cost"]
    head += [*(["memory"] if plan.stage_memory is not None else []), ""]
    rows = [head]
    shown = set(range(plan.num_stages))
    if plan.num_stages > _MOST_ROWS:
        half = _MOST_ROWS // 2
        shown = {*range(half), worst, *range(plan.num_stages - half, plan.num_stages)}
    before = -1
    for stage in sorted(shown):
        if stage != before + 1:
            rows.append(["...", *[""] * (len(head) - 1)])
        before = stage
        layers = plan.stages[stage]
        row = [str(stage), *([str(stage % plan.num_devices)] if shared else [])]
        row += [layers_text(layers), str(len(layers)), number_text(plan.stage_costs[stage])]
        if plan.stage_memory is not None:
            row.append(bytes_text(plan.stage_memory[stage]))
        row.append(bar(plan.stage_costs[stage] / top, block))
        rows.append(row)
    lines = columns(rows, left=(2 if shared else 1, len(head) - 1))
    costs = plan.device_costs
    device = max(range(plan.num_devices), key=lambda index: costs[index])
    kind = "device" if shared else "stage"
    lines.append(
        count_text(plan.num_stages, "stage")
        + (f" on {count_text(plan.num_devices, 'device')}" if shared else "")
        + f", bottleneck {number_text(plan.bottleneck)} ({kind} {device}), "
        f"balance {plan.balance:.3f}, method {plan.method}"
    )
    if plan.device_memory is not None:
        most = max(plan.device_memory)
        of = f" of {bytes_text(plan.memory_limit)}" if plan.memory_limit is not None else ""
        lines.append(f"most memory {bytes_text(most)}{of}")
    if plan.binding:
        lines.append(f"the bottleneck is bound by {', '.join(plan.binding)}")
    elif plan.method == "exact" and plan.balance < 1:
        lines.append("no option binds the bottleneck, only where layers end")
    return "\n".join(lines)


def comparison(plans: Mapping[str, Partition | str]) -> str:
    """Draws partitions of the same layers side by side.

    Args:
        plans: for each method, its partition or why it has none.

    Returns:
        Lines of text.
    """
    found = {name: plan for name, plan in plans.items() if isinstance(plan, Partition)}
    lines: list[str] = []
    if found:
        stages = max(plan.num_stages for plan in found.values())
        rows = [["stage"]]
        for name in found:
            rows[0] += [f"{name}: layers", "cost"]
        for stage in range(stages):
            row = [str(stage)]
            for plan in found.values():
                row += [layers_text(plan.stages[stage]), number_text(plan.stage_costs[stage])]
            rows.append(row)
        if stages > _MOST_ROWS:
            half = _MOST_ROWS // 2
            rows[half + 1 : -half] = [["...", *[""] * (len(rows[0]) - 1)]]
        best = min(plan.bottleneck for plan in found.values())
        summary = [["bottleneck"], ["over the best"], ["balance"], ["empty stages"]]
        for plan in found.values():
            over = plan.bottleneck / best - 1 if best else 0.0
            empty = sum(not layers for layers in plan.stages)
            summary[0] += ["", number_text(plan.bottleneck)]
            summary[1] += ["", f"{over:+.1%}" if over else "0%"]
            summary[2] += ["", f"{plan.balance:.3f}"]
            summary[3] += ["", str(empty)]
        lines = columns([*rows, *summary], left=())
        lines.insert(len(rows), "-" * max(len(line) for line in lines))
    lines += [f"{name}: {plan}" for name, plan in plans.items() if isinstance(plan, str)]
    return "\n".join(lines)
