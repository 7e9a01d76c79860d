"""The table of stages that training prints first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from models.one_billion_word.params import input_shapes_of, stages_of
from pipemesh.layers.partition_layers import layer_flops
from pipemesh.layers.pipeline.simd_cut import simd_cut
from pipemesh.text import columns


def stage_table(config: Any, task: Any, devices: Sequence[Sequence[str]]) -> str:
    """Which layers, what share of the flops, how many parameters and which devices a stage has.

    Args:
        config: the model's configuration.
        task: the instantiated task.
        devices: of each stage, one for each replica.
    """
    cells = stages_of(config)
    shapes = input_shapes_of(config)
    flops = layer_flops([layer for cell in cells for layer in cell.sub], *shapes)
    total, begin = sum(flops), 0
    stages = [(str(number), cell, devices[number]) for number, cell in enumerate(cells)]
    if config.PLAN.lowering == "simd" and config.PIPELINED:
        before, cells, behind = simd_cut(task.params.stack).split(cells)
        everywhere = list(dict.fromkeys(device for home in devices for device in home))
        ends = [("all", cell, everywhere) for cell in (before, behind)]
        stages = [
            ends[0],
            *((n, c, d) for (n, _, d), c in zip(stages, cells, strict=True)),
            ends[1],
        ]
    last = "device" if len(devices[0]) == 1 else "devices"
    rows = [("stage", "layers", "flops", "parameters", last)]
    for number, cell, places in stages:
        end = begin + len(cell.sub)
        variables = task.stack.children[cell.name].vars.Flatten()
        rows.append(
            (
                number,
                _summary([layer.cls.__name__ for layer in cell.sub]),
                f"{100 * sum(flops[begin:end]) / total:.1f}%",
                f"{sum(v.shape.num_elements() for v in variables):,}",
                " ".join(name.split("/")[-1].removeprefix("device:") for name in places),
            )
        )
        begin = end
    lines = columns(rows, left=(0, 1, 4))
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def _summary(names: list[str]) -> str:
    """Runs of equal names as `4 Block`."""
    runs: list[tuple[int, str]] = []
    for name in names:
        if runs and runs[-1][1] == name:
            runs[-1] = (runs[-1][0] + 1, name)
        else:
            runs.append((1, name))
    return " + ".join(name if count == 1 else f"{count} {name}" for count, name in runs)
