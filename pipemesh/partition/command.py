"""`pipemesh partition`: the partitioner in the shell."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from typing import Any

from pipemesh.errors import PartitionError, ScheduleError
from pipemesh.partition.compare import comparison
from pipemesh.partition.memory import REMAT_POLICIES, SCHEDULES
from pipemesh.partition.options import METHODS
from pipemesh.partition.read import read_costs
from pipemesh.partition.result import Partition, table
from pipemesh.partition.solve import partition
from pipemesh.report.partition_drawing import partition_to_svg
from pipemesh.schedule.names import help_text, parse
from pipemesh.text import bytes_option

# What `partition` calls the same.
_OPTIONS = (
    "speeds",
    "bandwidth",
    "overlap_transfers",
    "memory_limit",
    "num_microbatches",
    "optimizer_bytes_per_parameter_byte",
    "remat",
    "num_virtual_stages",
    "same_stage",
    "min_layers",
    "max_layers",
    "fixed",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the arguments of the command.

    Args:
        parser: of the command.
    """
    parser.description = (
        "Cuts layers into contiguous stages with the smallest possible bottleneck. COSTS is a CSV "
        "file (one number a line, or a header with cost or forward, backward, parameter_bytes, "
        "activation_bytes, boundary_bytes, shared_bytes, name), a JSON list of numbers or of "
        "objects with these fields, or - for standard input."
    )
    parser.epilog = f"schedules, in upper or lower case:\n{help_text()}"
    parser.add_argument("costs", metavar="COSTS", help="CSV or JSON file, or - for standard input")
    parser.add_argument("--stages", type=int, required=True, help="number of stages")
    parser.add_argument("--method", default="exact", help=f"{', '.join(METHODS)} (default: exact)")
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--speeds", type=_numbers, metavar="A,B,...", help="relative speed of each device"
    )
    group.add_argument(
        "--bandwidth",
        type=bytes_option,
        metavar="BYTES",
        help="bytes per unit of time between devices",
    )
    group.add_argument(
        "--overlap-transfers", action="store_true", help="transfers run beside the computation"
    )
    group.add_argument(
        "--virtual-stages",
        dest="num_virtual_stages",
        type=int,
        metavar="V",
        help="stages of each device (default: the schedule's)",
    )
    group = parser.add_argument_group("memory")
    group.add_argument(
        "--memory-limit",
        type=bytes_option,
        metavar="BYTES",
        help="of a device, such as 16GiB or 80GB",
    )
    group.add_argument(
        "--microbatches",
        dest="num_microbatches",
        type=int,
        metavar="M",
        help="microbatches of a step",
    )
    group.add_argument("--schedule", help="on which memory depends; spellings see below")
    group.add_argument("--remat", default="none", help=", ".join(REMAT_POLICIES))
    group.add_argument(
        "--optimizer-bytes",
        dest="optimizer_bytes_per_parameter_byte",
        type=float,
        default=2.0,
        metavar="X",
        help="bytes beside each byte of parameters (default: 2, Adam's moments)",
    )
    group = parser.add_argument_group("cuts")
    group.add_argument(
        "--same-stage",
        type=_integers,
        action="append",
        default=[],
        metavar="I,J,...",
        help="layers that share a stage; can be repeated",
    )
    group.add_argument("--min-layers", type=int, default=1, metavar="N", help="least of a stage")
    group.add_argument("--max-layers", type=int, metavar="N", help="most of a stage")
    group.add_argument(
        "--fixed",
        type=_integers,
        default=[],
        metavar="I,J,...",
        help="layers at which a stage has to begin",
    )
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="print JSON and not a table")
    group.add_argument(
        "--compare", action="store_true", help="show exact, lingvo and uniform side by side"
    )
    group.add_argument("--plot", metavar="OUT.SVG", help="write a picture of the stage costs")


def run(args: argparse.Namespace) -> int:
    """Runs the command.

    Args:
        args: what `add_arguments` declared, and `table_of`: a function of a schedule's name and
            the numbers of stages and microbatches, to what `partition` takes of its table.

    Returns:
        The exit code.

    Raises:
        PartitionError: the costs or the options are wrong, or no cut satisfies them.
    """
    costs = read_costs(*_read(args.costs))
    options = {name: value for name, value in vars(args).items() if name in _OPTIONS}
    options |= _schedule(args)
    if args.compare and args.method != "exact":
        raise PartitionError("--compare shows all methods; leave --method out")
    plans: dict[str, Partition | str] = {}
    for method in METHODS if args.compare else (args.method,):
        try:
            plans[method] = partition(costs, args.stages, method=method, **options)
        except PartitionError as error:
            # Of the rules in a comparison, only the exact one has to find a cut.
            if method == "exact" or not args.compare:
                raise
            plans[method] = str(error)
    found = {name: plan for name, plan in plans.items() if isinstance(plan, Partition)}
    if args.plot:
        try:
            pathlib.Path(args.plot).write_text(partition_to_svg(found), encoding="utf-8")
        except OSError as error:
            raise PartitionError(f"cannot write {args.plot}: {error.strerror}") from error
    if args.json:
        print(_json(plans) if args.compare else next(iter(found.values())).to_json(indent=2))
    elif args.compare:
        print(comparison(plans))
    else:
        print(table(next(iter(found.values())), block=_block()))
    return 0


def _schedule(args: argparse.Namespace) -> dict[str, Any]:
    """The schedule by its name where that is enough, else what its table says."""
    if args.schedule is None:
        return {}
    try:
        if parse(args.schedule).name in SCHEDULES:
            return {"schedule": args.schedule}
        if args.num_microbatches is None:
            raise PartitionError(
                f"--schedule {args.schedule} is simulated to count what its stages hold; give "
                "--microbatches"
            )
        return args.table_of(args.schedule, args.stages, args.num_microbatches)
    except ScheduleError as error:
        raise PartitionError(str(error)) from error


def _json(plans: dict[str, Partition | str]) -> str:
    return json.dumps(
        {
            name: json.loads(plan.to_json()) if isinstance(plan, Partition) else {"error": plan}
            for name, plan in plans.items()
        },
        indent=2,
    )


def _block() -> str:
    try:
        "█".encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return "#"
    return "█"


def _read(path: str) -> tuple[str, str]:
    if path == "-":
        return sys.stdin.read(), "standard input"
    try:
        return pathlib.Path(path).read_text(encoding="utf-8"), path
    except OSError as error:
        raise PartitionError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PartitionError(f"cannot read {path}: it is no UTF-8 text") from error


def _numbers(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be numbers such as 1,1,0.5") from None


def _integers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} must be layer indices such as 0,3") from None
