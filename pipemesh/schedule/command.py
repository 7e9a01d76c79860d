"""Builds, compares, simulates and draws pipeline schedules.

Costs are those of one device's share of the model; a schedule with several stages a device cuts
it into that many equal stages, so all schedules do the same work and can be compared. With one
value a stage the costs are taken as they are.

  pipemesh schedule --name zb_h1 --devices 4 --microbatches 8
  pipemesh schedule --compare --devices 4 --microbatches 8 --costs forward=1,backward=2
  pipemesh schedule --name list_schedule --devices 4 --microbatches 8 \\
      --costs forward=1:1:1:2 --memory-limit 4 --text schedule.txt
  pipemesh schedule --read schedule.txt --svg schedule.svg
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders import build
from pipemesh.schedule.compare import compare, fit_costs, scale_limit, table
from pipemesh.schedule.costs import Costs, costs_from_text
from pipemesh.schedule.csv import CSV_FORMS, write_csv
from pipemesh.schedule.list_schedule import list_schedule
from pipemesh.schedule.names import FILE, SEARCHED, help_text, parse
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.spec import read_table, text_with_costs
from pipemesh.schedule.timeline import Timeline
from pipemesh.text import number


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `pipemesh schedule`.

    Args:
        parser: the parser of this subcommand.
    """
    parser.epilog = f"schedules, in upper or lower case:\n{help_text()}"
    what = parser.add_argument_group("what to look at (one of these)")
    what.add_argument("--name", help="a schedule, see below")
    what.add_argument("--compare", action="store_true", help="one row for every schedule")
    what.add_argument("--read", metavar="FILE", help="a schedule of your own, as text or .csv")
    size = parser.add_argument_group("size and costs")
    size.add_argument("--devices", type=int, metavar="D")
    size.add_argument("--microbatches", type=int, metavar="M")
    size.add_argument("--virtual-stages", type=int, metavar="V", help="stages a device")
    size.add_argument(
        "--costs",
        default="",
        help="for example forward=1,backward=2,transfer=0.1, or forward=1:1:1:2 for one value a "
        "stage; names are forward, backward, input_grad, weight_grad, transfer and "
        "recompute, or their first letters",
    )
    size.add_argument(
        "--memory-limit",
        metavar="N",
        help=f"for {SEARCHED}: how many microbatches' activations of its whole share of the model "
        "a device may hold; one number or one a device with colons between",
    )
    size.add_argument("--jitter", type=float, default=0.0, help="spread of durations, 0 to 1")
    size.add_argument("--seed", type=int, default=0, help="of the jitter")
    out = parser.add_argument_group("files to write, besides the table on the terminal")
    for option, text in (
        ("--svg", "a picture"),
        ("--html", "a page with tooltips, summary and memory plot"),
        ("--trace", "a trace for chrome://tracing or ui.perfetto.dev"),
        ("--csv", "the table that torch.distributed.pipelining loads, or see --csv-form"),
        ("--text", "the table as text, with its costs, that --read and Schedule.from_text read"),
        ("--memory", "a plot of activations held over time"),
    ):
        out.add_argument(option, metavar="FILE", help=text)
    parser.add_argument(
        "--csv-form",
        choices=CSV_FORMS,
        default=CSV_FORMS[0],
        help="of --csv: actions alone, with sends and receives, or as the zero-bubble authors "
        "write them",
    )
    parser.add_argument(
        "--color", choices=("auto", "always", "never"), default="auto", help="of the table"
    )


def run(arguments: argparse.Namespace) -> int:
    """Does what the options say.

    Args:
        arguments: the parsed options.

    Returns:
        The exit code, 0.

    Raises:
        ScheduleError: the options do not fit together, or what they ask for is impossible.
    """
    chosen = [name for name in ("name", "compare", "read") if getattr(arguments, name)]
    if len(chosen) != 1:
        given = " and ".join(f"--{name}" for name in chosen) or "none"
        raise ScheduleError(f"give one of --name, --compare and --read; {given} given")
    parsed = parse(arguments.name) if arguments.name else None
    if parsed is not None and parsed.name == FILE:
        arguments.read = parsed.rest
    given = costs_from_text(arguments.costs) if arguments.costs else None
    costs = given or Costs()
    if arguments.compare:
        _compare(arguments, costs)
        return 0
    if arguments.read:
        schedule, kept = _read(arguments)
        title = Path(arguments.read).name
        if kept is None and not given:
            print(
                f"pipemesh: note: {title} does not say the costs that it was made for; every "
                "forward takes 1 here. Give --costs, or write the table by --text, which keeps "
                "them",
                file=sys.stderr,
            )
        sizes = schedule.num_devices, schedule.num_stages, schedule.num_slices
        fitted = kept if kept and not given else fit_costs(costs, *sizes)
    else:
        schedule, fitted = _build(arguments, costs)
        title = arguments.name
    timeline = simulate(schedule, fitted, jitter=arguments.jitter, seed=arguments.seed)
    print(_report(title, timeline, arguments.color))
    _write_files(arguments, title, timeline)
    return 0


def _counts(arguments: argparse.Namespace) -> tuple[int, int]:
    missing = [f"--{name}" for name in ("devices", "microbatches") if not _given(arguments, name)]
    if missing:
        raise ScheduleError(
            f"{' and '.join(missing)} missing; for example --devices 4 --microbatches 8"
        )
    return arguments.devices, arguments.microbatches


def _given(arguments: argparse.Namespace, name: str) -> bool:
    return getattr(arguments, name) is not None


def _memory_limit(arguments: argparse.Namespace) -> int | list[int] | None:
    if arguments.memory_limit is None:
        return None
    try:
        limits = [int(item) for item in arguments.memory_limit.split(":")]
    except ValueError:
        raise ScheduleError(
            f"--memory-limit is {arguments.memory_limit!r}; give an integer, or one a device "
            "with colons between, such as 4:3:2:1"
        ) from None
    return limits if len(limits) > 1 else limits[0]


def _compare(arguments: argparse.Namespace, costs: Costs) -> None:
    for option in ("svg", "html", "trace", "csv", "text", "memory"):
        if getattr(arguments, option):
            raise ScheduleError(f"--{option} draws one schedule; give --name instead of --compare")
    if arguments.jitter:
        raise ScheduleError("--jitter is for one schedule; give --name instead of --compare")
    num_devices, num_microbatches = _counts(arguments)
    rows = compare(
        costs, num_devices, num_microbatches, arguments.virtual_stages, _memory_limit(arguments)
    )
    print(table(rows))


def _build(arguments: argparse.Namespace, costs: Costs) -> tuple[Schedule, Costs]:
    num_devices, num_microbatches = _counts(arguments)
    virtual_stages = arguments.virtual_stages
    limit = _memory_limit(arguments)
    if parse(arguments.name).name != SEARCHED:
        if limit is not None:
            raise ScheduleError(f"--memory-limit is for {SEARCHED}; {arguments.name} is fixed")
        schedule = build(arguments.name, num_devices, num_microbatches, virtual_stages)
        sizes = schedule.num_stages, schedule.num_slices
        return schedule, fit_costs(costs, num_devices, *sizes)
    num_stages = num_devices * virtual_stages if virtual_stages else costs.num_stages or num_devices
    fitted = fit_costs(costs, num_devices, num_stages)
    limit = scale_limit(limit, max(1, num_stages // num_devices))
    schedule = list_schedule(fitted, num_devices, num_microbatches, limit, virtual_stages)
    return schedule, fitted


def _read(arguments: argparse.Namespace) -> tuple[Schedule, Costs | None]:
    for option in ("devices", "microbatches", "virtual_stages", "memory_limit"):
        if _given(arguments, option):
            raise ScheduleError(
                f"--{option.replace('_', '-')} does not go with --read; the file says it all"
            )
    return read_table(arguments.read)


def _report(title: str, timeline: Timeline, color: str) -> str:
    # Drawing loads other rooms, which a comparison does not need.
    from pipemesh.report import to_terminal

    schedule = timeline.schedule
    counts = ", ".join(
        f"{count} {noun}{'' if count == 1 else 's'}"
        for count, noun in (
            (schedule.num_devices, "device"),
            (schedule.num_stages, "stage"),
            (schedule.num_microbatches, "microbatch"),
            *([(schedule.num_slices, "slice")] if schedule.num_slices > 1 else []),
        )
    ).replace("microbatchs", "microbatches")
    stage_costs = timeline.costs.per_stage(schedule.num_stages)
    costs = ", ".join(
        f"{name} {_values(values)}"
        for name, values in (*stage_costs.durations().items(), ("transfer", stage_costs.transfer))
        if name != "R" or schedule.recomputed()
    )
    terminal = sys.stdout.isatty()
    colored = color == "always" or (color == "auto" and terminal and not os.environ.get("NO_COLOR"))
    width = max(40, shutil.get_terminal_size().columns) if terminal else None
    return "\n".join(
        [
            f"{title}: {counts}",
            f"costs a stage: {costs}",
            "",
            to_terminal(timeline, color=colored, width=width),
            "",
            f"makespan {number(timeline.makespan)}, bubble {number(max(timeline.bubble))} "
            f"({timeline.bubble_ratio:.1%}), largest own-span bubble "
            f"{number(max(timeline.own_span_bubble))}, "
            f"peak activations {max(timeline.peak_activations)}",
        ]
    )


def _values(values: tuple[float, ...]) -> str:
    return number(values[0]) if len(set(values)) == 1 else ":".join(map(number, values))


def _write_files(arguments: argparse.Namespace, title: str, timeline: Timeline) -> None:
    from pipemesh.report import memory_to_svg, to_html, to_svg, to_trace

    schedule = timeline.schedule
    for option, write in (
        ("svg", lambda: to_svg(timeline, title=title)),
        ("html", lambda: to_html(timeline, title=title)),
        ("trace", lambda: to_trace(timeline)),
        ("csv", lambda: write_csv(schedule, arguments.csv_form)),
        ("text", lambda: text_with_costs(schedule, timeline.costs)),
        ("memory", lambda: memory_to_svg(timeline)),
    ):
        target = getattr(arguments, option)
        if target:
            try:
                Path(target).write_text(write(), encoding="utf-8")
            except OSError as error:
                raise ScheduleError(f"cannot write {target}: {error.strerror}") from None
            print(f"wrote {target}")
