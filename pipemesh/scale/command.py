"""Says what a training would take on many devices, from measured figures.

FIGURES is what `pipemesh plan --save` wrote, or a JSON list of costs of layers in seconds and bytes
(fields of `pipemesh.partition.LayerCost`, for --rows rows). Each number of devices gets the best
mesh, schedule, number of microbatches and remat that was found, its step simulated, and the
interval of checkpoints that loses least.

  pipemesh scale figures.json --devices 64,256,1024,4096 --batch 4096 --host 8 \\
      --inside 5e-6,200e9 --between 1e-5,25e9 --memory 80e9 --failure-hours 50000
"""

from __future__ import annotations

import argparse
import json
import math
from typing import Any

from pipemesh.errors import PlanError
from pipemesh.plan.figures import Figures
from pipemesh.plan.many_devices import SCHEDULES, Forecast, Job, Reliability, forecast
from pipemesh.plan.network import Link, Network
from pipemesh.plan.output_file import check_output, write_output
from pipemesh.text import bytes_of, bytes_option, columns

_HOUR = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `pipemesh scale`.

    Args:
        parser: the parser of this subcommand.
    """
    parser.add_argument("figures", metavar="FIGURES", help="JSON, see above")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--batch", type=int, required=True, metavar="ROWS", help="rows of a batch")
    what.add_argument(
        "--rows",
        type=_above_zero,
        default=1.0,
        help="rows that a list of costs is for (default: 1)",
    )
    what.add_argument(
        "--layers",
        type=int,
        metavar="N",
        help="repeat the layer in the middle until there are so many",
    )
    what.add_argument(
        "--optimizer",
        type=_from_zero,
        metavar="X",
        help="bytes of its state for each byte of weights",
    )
    devices = parser.add_argument_group("devices")
    devices.add_argument(
        "--devices", default="64,128,256,512,1024,2048,4096", help="numbers, with commas between"
    )
    devices.add_argument("--host", type=int, default=8, metavar="N", help="devices a host")
    devices.add_argument(
        "--inside",
        type=_link,
        default="5e-6,200e9",
        metavar="S,B",
        help="seconds of latency and "
        "bytes a second between devices of a host (default: 5e-6,200e9)",
    )
    devices.add_argument(
        "--between",
        type=_link,
        default="1e-5,25e9",
        metavar="S,B",
        help="the same between a device and those of other hosts (default: 1e-5,25e9)",
    )
    devices.add_argument(
        "--memory", type=bytes_option, metavar="BYTES", help="of a device, such as 16GiB or 80GB"
    )
    devices.add_argument(
        "--faster",
        type=_above_zero,
        default=1.0,
        metavar="X",
        help="how many times as fast a device computes as the measured one",
    )
    failures = parser.add_argument_group("failures")
    failures.add_argument(
        "--failure-hours",
        type=_above_zero,
        metavar="H",
        help="from one failure of a device to the next",
    )
    failures.add_argument(
        "--storage",
        type=bytes_option,
        default=2e9,
        metavar="BYTES",
        help="bytes a second that a host writes to storage (default: 2e9)",
    )
    failures.add_argument(
        "--notice",
        type=_from_zero,
        default=30.0,
        metavar="S",
        help="seconds until a failure is noticed and a device stands in (default: 30)",
    )
    failures.add_argument(
        "--start",
        type=_from_zero,
        default=60.0,
        metavar="S",
        help="seconds until the first step runs (default: 60)",
    )
    parser.add_argument(
        "--schedules", default=",".join(SCHEDULES), help=f"to try (default: {','.join(SCHEDULES)})"
    )
    parser.add_argument("--parts", action="store_true", help="what each step is made of, too")
    parser.add_argument("--json", metavar="FILE", help="write all of it there, too")


def run(arguments: argparse.Namespace) -> int:
    """Does what the options say.

    Args:
        arguments: the parsed options.

    Returns:
        The exit code, 0.

    Raises:
        PlanError: the figures are malformed, or no way fits.
    """
    check_output("--json", arguments.json)
    figures = Figures.read(arguments.figures, arguments.rows)
    job = job_of(figures, arguments)
    reliability = None
    if arguments.failure_hours is not None:
        reliability = Reliability(
            arguments.failure_hours * _HOUR, arguments.storage, arguments.notice, arguments.start
        )
    numbers = _numbers(arguments.devices)
    schedules = arguments.schedules.split(",")
    found = {number: forecast(job, number, reliability, schedules) for number in numbers}
    print("\n".join(columns(_rows(job, found), left=(1,))))
    if arguments.parts:
        print("\nseconds of a step, by what takes them")
        print("\n".join(columns(_part_rows(found))))
    values = {number: _values(job, each) for number, each in found.items()}
    write_output("--json", arguments.json, json.dumps(values, indent=1))
    return 0


def job_of(figures: Figures, arguments: argparse.Namespace) -> Job:
    """The training that the options ask for.

    Args:
        figures: of the model.
        arguments: the parsed options.

    Raises:
        PlanError: a number is out of range.
    """
    layers = list(figures.layers)
    if arguments.layers is not None:
        if arguments.layers < len(layers):
            raise PlanError(
                f"--layers is {arguments.layers}, but the figures are of {len(layers)}; give more"
            )
        middle = len(layers) // 2
        layers[middle:middle] = [layers[middle]] * (arguments.layers - len(layers))
    state = figures.optimizer if arguments.optimizer is None else arguments.optimizer
    return Job(
        tuple(layer.faster(arguments.faster) for layer in layers),
        Network(arguments.host, arguments.inside, arguments.between),
        arguments.batch,
        arguments.memory,
        figures.action,
        state,
        figures.update / arguments.faster,
        figures.fixed,
        figures.update_memory,
    )


def _above_zero(text: str) -> float:
    return _number(text, "above 0")


def _from_zero(text: str) -> float:
    return _number(text, "from 0 on")


def _number(text: str, allowed: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and (number > 0 or (number == 0 and allowed == "from 0 on"))):
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; give a number {allowed}")
    return number


def _link(text: str) -> Link:
    try:
        latency, bandwidth = text.split(",")
        return Link(float(latency), bytes_of(bandwidth))
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} must be seconds of latency and bytes a second, such as 1e-5,25e9 ({error})"
        ) from None


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise PlanError(f"--devices is {text!r}; give numbers from 1 on, such as 64,256,1024")
    return numbers


def _rows(job: Job, found: dict[int, Forecast]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [
        (
            "devices",
            "mesh",
            "schedule",
            "microbatches",
            "remat",
            "step s",
            "bubble",
            "memory GB",
            "save every s",
            "goodput",
            "rows/s",
            "of ideal",
            "binds",
        )
    ]
    for number, each in found.items():
        step, split = each.step, each.step.split
        rows.append(
            (
                f"{number:,}",
                split.mesh,
                split.schedule,
                f"{split.num_microbatches:,}",
                str(split.remat),
                f"{step.seconds:.3g}",
                f"{step.bubble:.1%}",
                f"{step.fullest / 1e9:.3g}",
                f"{each.interval:.0f}" if each.failures else "-",
                f"{each.goodput:.1%}" if each.failures else "-",
                f"{each.rows * job.batch:.4g}",
                f"{step.parts['compute'] / step.seconds * each.goodput:.1%}",
                each.binds,
            )
        )
    return rows


def _part_rows(found: dict[int, Forecast]) -> list[tuple[str, ...]]:
    names = list(next(iter(found.values())).step.parts)
    rows = [("devices", *names)]
    for number, each in found.items():
        rows.append((f"{number:,}", *(f"{each.step.parts[name]:.3g}" for name in names)))
    return rows


def _values(job: Job, each: Forecast) -> dict[str, Any]:
    step, failures = each.step, each.failures
    return {
        "mesh": step.split.mesh,
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
