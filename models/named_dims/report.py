"""A trainer's report about its plan before the first step."""

from __future__ import annotations

from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.text import columns

from .trainer import Trainer


def plan_report(trainer: Trainer, mesh: Mesh, rules: LayoutRules) -> str:
    """Returns the slices that a device holds, and the communication of a step."""
    lines = [weight_table(trainer), "", "communication of a step, a device:", str(trainer.costs)]
    used = {axis for _, axis in rules.rules}
    for axis, size in zip(mesh.axis_names, mesh.shape, strict=True):
        if size > 1 and axis not in used:
            lines.append(
                f"no rule splits over axis {axis!r}: the {size} devices along it compute the same"
            )
    return "\n".join(lines)


def weight_table(trainer: Trainer) -> str:
    """Returns a table of each weight's layout, its parameters, and its parameters on a device."""
    rows = [("weight", "layout", "parameters", "a device")]
    total = held = 0
    for variable in trainer.variables:
        size = variable.layout.shape.size
        part = int(variable.variables[0].shape.num_elements())
        rows.append((variable.name, str(variable.layout), f"{size:,}", f"{part:,}"))
        total, held = total + size, held + part
    rows.append(("total", "", f"{total:,}", f"{held:,}"))
    return "\n".join(columns(rows, left=range(2)))
