"""Partitions of the same layers side by side."""

from __future__ import annotations

from collections.abc import Mapping

from pipemesh.partition.result import Partition
from pipemesh.partition.text import MOST_ROWS, layers_text, number_text
from pipemesh.text import columns


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
        if stages > MOST_ROWS:
            half = MOST_ROWS // 2
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
