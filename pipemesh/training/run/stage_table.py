"""The table of stages that a run prints first, and records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipemesh.backend.devices import short_name
from pipemesh.layers.meta import layer_flops
from pipemesh.layers.pipeline.alike_stages import simd_cut
from pipemesh.text import columns


def stage_table(rows: Sequence[Sequence[str]]) -> str:
    """Returns the result of `stage_rows` as text."""
    lines = columns(rows, left=(0, 1, len(rows[0]) - 1))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def stage_rows(stack: Any, shapes: Sequence[Any] | None = None) -> list[tuple[str, ...]]:
    """Returns the column names, and a row for each stage: layers, share of flops, parameters,
    devices.

    The stack must be on the cluster on which it was made. `shapes` are its inputs for a microbatch,
    or None if unknown.
    """
    p = stack.params
    cells = list(p.cell_tpl)
    devices = [home.devices for home in stack.StageHomes()]
    flops = None
    if shapes is not None:
        flops = layer_flops([layer for cell in cells for layer in layers_of(cell)], *shapes)
    begin = 0
    stages = [(str(number), cell, devices[number]) for number, cell in enumerate(cells)]
    if p.lowering == "simd" and p.loss_inside and p.pipelined:
        before, cells, behind = simd_cut(p).split(cells)
        everywhere = list(dict.fromkeys(device for home in devices for device in home))
        ends = [("all", cell, everywhere) for cell in (before, behind)]
        stages = [
            ends[0],
            *((n, c, d) for (n, _, d), c in zip(stages, cells, strict=True)),
            ends[1],
        ]
    last = "device" if len(devices[0]) == 1 else "devices"
    shares = () if flops is None else ("flops",)
    rows: list[tuple[str, ...]] = [("stage", "layers", *shares, "parameters", last)]
    for number, cell, places in stages:
        layers = layers_of(cell)
        end = begin + len(layers)
        if flops is not None:
            shares = (f"{100 * sum(flops[begin:end]) / sum(flops):.1f}%",)
        variables = stack.children[cell.name].vars.Flatten()
        rows.append(
            (
                number,
                _summary([layer.cls.__name__ for layer in layers]),
                *shares,
                f"{sum(v.shape.num_elements() for v in variables):,}",
                " ".join(map(short_name, places)),
            )
        )
        begin = end
    return rows


def layers_of(cell: Any) -> list[Any]:
    """Returns the params of the layers in a stage's params."""
    return list(cell.sub) if "sub" in cell else [cell]


def _summary(names: list[str]) -> str:
    """Joins names, with repeated ones as `4 Block`."""
    runs: list[tuple[int, str]] = []
    for name in names:
        if runs and runs[-1][1] == name:
            runs[-1] = (runs[-1][0] + 1, name)
        else:
            runs.append((1, name))
    return " + ".join(name if count == 1 else f"{count} {name}" for count, name in runs)
