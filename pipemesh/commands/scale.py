"""Predicts the time and memory of a training on many devices, from measured figures.

FIGURES is a file that `pipemesh plan --save` wrote, or a JSON list of costs of layers in seconds
and bytes (fields of `pipemesh.partition.LayerCost`, for --rows examples). Each number of devices
gets the best mesh, schedule, number of microbatches and remat that was found, its step simulated,
and the checkpoint interval that loses least.

  pipemesh scale figures.json --devices=64,256,1024,4096 --batch_size=4096 --host=8 \\
      --inside=5e-6,200e9 --between=1e-5,25e9 --device_memory=80e9 --failure_hours=50000
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

from pipemesh.commands.flags import (
    DEVICE_MEMORY,
    Command,
    Flag,
    Flags,
    check_output,
    grouped,
    parse,
    write_output,
)
from pipemesh.errors import PlanError
from pipemesh.plan.figures import Figures
from pipemesh.plan.many_devices import SCALED_SCHEDULES, Forecast, Job, Reliability, forecast
from pipemesh.plan.network import Link, Network
from pipemesh.text import bytes_of, columns, number

_HOUR = 3600.0


def _finite(text: str) -> float:
    """Returns a number; NaN if the text is none, or is not finite."""
    try:
        value = float(text)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan


def _above_zero(text: str) -> float:
    value = _finite(text)
    if not value > 0:
        raise ValueError("it must be a number above 0")
    return value


def _from_zero(text: str) -> float:
    value = _finite(text)
    if not value >= 0:
        raise ValueError("it must be a number from 0 on, and finite")
    return value


def _link(text: str) -> Link:
    try:
        latency, bandwidth = text.split(",")
        return Link(float(latency), bytes_of(bandwidth))
    except ValueError as error:
        raise ValueError(
            f"it must be seconds of latency and bytes a second, such as 1e-5,25e9 ({error})"
        ) from None


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ValueError("give numbers from 1 on, such as 64,256,1024")
    return numbers


COMMAND = Command(
    "pipemesh scale",
    __doc__,
    (
        Flag("figures", argument="once", help="JSON file of figures or costs, see above."),
        *grouped(
            "training",
            Flag(
                "batch_size",
                int,
                required=True,
                value="ROWS",
                help="Examples of a batch.",
            ),
            Flag("rows", _above_zero, 1.0, help="Examples that a list of costs is for."),
            Flag(
                "layers",
                int,
                value="N",
                help="Repeat the layer in the middle until the model has this many layers.",
            ),
            Flag(
                "optimizer",
                _from_zero,
                value="X",
                help="Bytes of optimizer state for each byte of weights.",
            ),
        ),
        *grouped(
            "devices",
            Flag(
                "devices",
                _numbers,
                [64, 128, 256, 512, 1024, 2048, 4096],
                help="Numbers of devices, with commas between (default: "
                "64,128,256,512,1024,2048,4096).",
            ),
            Flag("host", int, 8, value="N", help="Devices of a host."),
            Flag(
                "inside",
                _link,
                _link("5e-6,200e9"),
                value="S,B",
                help="Seconds of latency and bytes a second between devices of a host (default: "
                "5e-6,200e9).",
            ),
            Flag(
                "between",
                _link,
                _link("1e-5,25e9"),
                value="S,B",
                help="The same between a device and devices of other hosts (default: 1e-5,25e9).",
            ),
            DEVICE_MEMORY,
            Flag(
                "faster",
                _above_zero,
                1.0,
                value="X",
                help="Speed of a device, as a multiple of the measured one's.",
            ),
        ),
        *grouped(
            "failures",
            Flag(
                "failure_hours",
                _above_zero,
                value="H",
                help="Mean hours between failures of one device.",
            ),
            Flag(
                "storage",
                bytes_of,
                2e9,
                value="BYTES",
                help="Bytes a second that a host writes to storage (default: 2e9).",
            ),
            Flag(
                "notice",
                _from_zero,
                30.0,
                value="S",
                help="Seconds until a failure is detected and the device replaced.",
            ),
            Flag("start", _from_zero, 60.0, value="S", help="Seconds until the first step runs."),
        ),
        Flag("schedules", default=",".join(SCALED_SCHEDULES), help="Schedules to try."),
        Flag("parts", bool, False, help="Show the parts of each step, too."),
        Flag("json", value="FILE", help="Write all of it there, too."),
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, COMMAND)
    check_output("--json", flags.json)
    figures = Figures.read(flags.figures, flags.rows)
    job = job_of(figures, flags)
    reliability = None
    if flags.failure_hours is not None:
        reliability = Reliability(
            flags.failure_hours * _HOUR, flags.storage, flags.notice, flags.start
        )
    schedules = flags.schedules.split(",")
    forecasts = {number: forecast(job, number, reliability, schedules) for number in flags.devices}
    print("\n".join(columns(_rows(job, forecasts), left=(1, 2))))
    if flags.parts:
        print("\nseconds of a step, by part")
        print("\n".join(columns(_part_rows(forecasts))))
    values = {number: _values(job, each) for number, each in forecasts.items()}
    write_output("--json", flags.json, json.dumps(values, indent=1))
    return 0


def job_of(figures: Figures, flags: Flags) -> Job:
    """Returns the training that the flags describe."""
    layers = list(figures.layers)
    if flags.layers is not None:
        if flags.layers < len(layers):
            raise PlanError(
                f"--layers is {flags.layers}, but the figures are of {len(layers)}; give more"
            )
        middle = len(layers) // 2
        layers[middle:middle] = [layers[middle]] * (flags.layers - len(layers))
    state = figures.optimizer
    if flags.optimizer is not None:
        state = flags.optimizer
        layers = [dataclasses.replace(layer, optimizer=None) for layer in layers]
    return Job(
        tuple(layer.faster(flags.faster) for layer in layers),
        Network(flags.host, flags.inside, flags.between),
        flags.batch_size,
        flags.device_memory,
        figures.action,
        state,
        figures.update / flags.faster,
        figures.fixed,
        figures.update_memory,
        figures.rules,
    )


def _rows(job: Job, found: dict[int, Forecast]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            *("devices", "mesh", "layout", "schedule", "microbatches", "remat"),
            *("step s", "bubble", "memory GB", "save every s", "goodput"),
            *("rows/s", "of ideal", "binds"),
        )
    ]
    for devices, each in found.items():
        step, split = each.step, each.step.split
        rows.append(
            (
                f"{devices:,}",
                split.mesh,
                split.rules(job.figures) or "-",
                split.schedule,
                f"{split.num_microbatches:,}",
                str(split.remat),
                number(step.seconds, digits=3),
                f"{step.bubble:.1%}",
                number(step.fullest / 1e9, digits=3),
                f"{each.interval:.0f}" if each.failures else "-",
                f"{each.goodput:.1%}" if each.failures else "-",
                number(each.rows * job.batch),
                f"{step.parts['compute'] / step.seconds * each.goodput:.1%}",
                each.binds,
            )
        )
    return rows


def _part_rows(found: dict[int, Forecast]) -> list[tuple[str, ...]]:
    names = list(next(iter(found.values())).step.parts)
    rows = [("devices", *names)]
    for devices, each in found.items():
        parts = (number(each.step.parts[name], digits=3) for name in names)
        rows.append((f"{devices:,}", *parts))
    return rows


def _values(job: Job, each: Forecast) -> dict[str, Any]:
    step, failures = each.step, each.failures
    return {
        "mesh": step.split.mesh,
        "layout": step.split.rules(job.figures),
        "schedule": step.split.schedule,
        "num_microbatches": step.split.num_microbatches,
        "remat": str(step.split.remat),
        "seconds": step.seconds,
        "parts": step.parts,
        "bubble": step.bubble,
        "memory": step.fullest,
        "interval": each.interval,
        "young": failures.young if failures else None,
        "daly": failures.daly if failures else None,
        "save": failures.save if failures else None,
        "between_failures": failures.between if failures else None,
        "goodput": each.goodput,
        "rows_a_second": each.rows * job.batch,
        "binds": each.binds,
    }
