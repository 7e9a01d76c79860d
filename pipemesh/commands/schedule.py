"""Builds, compares, simulates and draws pipeline schedules.

Costs are those of one device's share of the model. A schedule with several stages a device cuts it
into that many equal stages, so all schedules do the same work and can be compared. With one value
a stage the costs are taken as they are.

  pipemesh schedule --name=zb_h1 --devices=4 --num_microbatches=8
  pipemesh schedule --compare --devices=4 --num_microbatches=8 --costs=forward=1,backward=2
  pipemesh schedule --name=list_schedule --devices=4 --num_microbatches=8 \\
      --costs=forward=1:1:1:2 --memory_limit=4 --text=schedule.txt
  pipemesh schedule --read=schedule.txt --svg=schedule.svg
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from pipemesh.commands.flags import (
    NUM_MICROBATCHES,
    NUM_VIRTUAL_STAGES,
    Command,
    Flag,
    Flags,
    grouped,
    parse,
    write_output,
)
from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders import BUILDERS, SLICED, build
from pipemesh.schedule.costs import Costs, costs_from_text
from pipemesh.schedule.csv import CSV_FORMS, write_csv
from pipemesh.schedule.list_schedule import MemoryLimit, list_schedule
from pipemesh.schedule.names import FILE, NAMES, SEARCHED, help_text
from pipemesh.schedule.names import parse as parse_schedule
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.spec import read_table, text_with_costs
from pipemesh.schedule.timeline import Timeline
from pipemesh.text import columns, count_text, number


def _limits(text: str) -> MemoryLimit:
    try:
        limits = [int(item) for item in text.split(":")]
    except ValueError:
        raise ValueError(
            "give an integer, or one a device with colons between, such as 4:3:2:1"
        ) from None
    return limits if len(limits) > 1 else limits[0]


COMMAND = Command(
    "pipemesh schedule",
    __doc__,
    (
        *grouped(
            "schedule (one of these)",
            Flag("name", help="A schedule; the spellings are below."),
            Flag("compare", bool, False, help="One row for every schedule."),
            Flag("read", value="FILE", help="A schedule of your own, as text or .csv."),
        ),
        *grouped(
            "size and costs",
            Flag("devices", int, value="D", help="Number of devices."),
            NUM_MICROBATCHES,
            NUM_VIRTUAL_STAGES,
            Flag(
                "costs",
                default="",
                help="Costs such as forward=1,backward=2,transfer=0.1, or forward=1:1:1:2 for one "
                "value a stage; names are forward, backward, input_grad, weight_grad, "
                "transfer, recompute, gradient_sum and all_gather, or their first letters.",
            ),
            Flag(
                "memory_limit",
                _limits,
                value="N",
                help=f"For {SEARCHED}: how many microbatches' activations of its whole share of "
                "the model a device may hold; one number, or one a device with colons between.",
            ),
            Flag("jitter", float, 0.0, help="Spread of durations, 0 to 1."),
            Flag("seed", int, 0, help="Seed of the jitter."),
        ),
        *grouped(
            "files to write, besides the table on the terminal",
            Flag("svg", value="FILE", help="A picture."),
            Flag("html", value="FILE", help="A page with tooltips, summary and memory plot."),
            Flag("trace", value="FILE", help="A trace for chrome://tracing or ui.perfetto.dev."),
            Flag(
                "csv",
                value="FILE",
                help="The table that torch.distributed.pipelining loads, or see --csv_form.",
            ),
            Flag(
                "text",
                value="FILE",
                help="The table as text, with its costs, as --read and Schedule.from_text read it.",
            ),
            Flag("memory", value="FILE", help="A plot of activations held over time."),
            Flag(
                "csv_form",
                default=CSV_FORMS[0],
                choices=CSV_FORMS,
                help="Form of --csv: actions alone, with sends and receives, or as the "
                "zero-bubble authors write them.",
            ),
        ),
        Flag("color", default="auto", choices=("auto", "always", "never"), help="Color the table."),
    ),
    more=f"schedules, in upper or lower case:\n{help_text()}",
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    arguments = parse(argv, COMMAND)
    chosen = [name for name in ("name", "compare", "read") if arguments.value(name)]
    if len(chosen) != 1:
        names = " and ".join(f"--{name}" for name in chosen) or "none"
        raise ScheduleError(f"give one of --name, --compare and --read; {names} given")
    parsed = parse_schedule(arguments.name) if arguments.name else None
    if parsed is not None and parsed.name == FILE:
        arguments.set("read", parsed.rest)
    model_costs = costs_from_text(arguments.costs) if arguments.costs else None
    costs = model_costs or Costs()
    if arguments.compare:
        _compare(arguments, costs)
        return 0
    if arguments.read:
        for option in ("devices", "num_microbatches", "num_virtual_stages", "memory_limit"):
            if arguments.value(option) is not None:
                raise ScheduleError(f"--{option} does not go with --read; the file says it all")
        schedule, kept = read_table(arguments.read)
        title = Path(arguments.read).name
        if kept is None and not model_costs:
            print(
                f"note: {title} does not say the costs that it was made for; every forward takes "
                "1 here. Give --costs, or write the table with --text, which keeps them",
                file=sys.stderr,
            )
        sizes = schedule.num_devices, schedule.num_stages, schedule.num_slices
        fitted = kept if kept and not model_costs else fit_costs(costs, *sizes)
    else:
        schedule, fitted = _build(arguments, costs)
        title = arguments.name
    timeline = simulate(schedule, fitted, jitter=arguments.jitter, seed=arguments.seed)
    print(_report(title, timeline, arguments.color))
    _write_files(arguments, title, timeline)
    return 0


def _counts(arguments: Flags) -> tuple[int, int]:
    names = ("devices", "num_microbatches")
    missing = [f"--{name}" for name in names if arguments.value(name) is None]
    if missing:
        raise ScheduleError(
            f"{' and '.join(missing)} missing; for example --devices=4 --num_microbatches=8"
        )
    return arguments.devices, arguments.num_microbatches


def _compare(arguments: Flags, costs: Costs) -> None:
    for option in ("svg", "html", "trace", "csv", "text", "memory"):
        if arguments.value(option):
            raise ScheduleError(f"--{option} draws one schedule; give --name instead of --compare")
    if arguments.jitter:
        raise ScheduleError("--jitter is for one schedule; give --name instead of --compare")
    num_devices, num_microbatches = _counts(arguments)
    limits = arguments.num_virtual_stages, arguments.memory_limit
    print(table(*compare(costs, num_devices, num_microbatches, *limits)))


def _build(arguments: Flags, costs: Costs) -> tuple[Schedule, Costs]:
    num_devices, num_microbatches = _counts(arguments)
    virtual_stages = arguments.num_virtual_stages
    limit = arguments.memory_limit
    if parse_schedule(arguments.name).name != SEARCHED:
        if limit is not None:
            raise ScheduleError(f"--memory_limit is for {SEARCHED}; {arguments.name} is fixed")
        schedule = build(arguments.name, num_devices, num_microbatches, virtual_stages)
        sizes = schedule.num_stages, schedule.num_slices
        return schedule, fit_costs(costs, num_devices, *sizes)
    num_stages = num_devices * virtual_stages if virtual_stages else costs.num_stages or num_devices
    fitted = fit_costs(costs, num_devices, num_stages)
    limit = scale_limit(limit, max(1, num_stages // num_devices))
    schedule = list_schedule(fitted, num_devices, num_microbatches, limit, virtual_stages)
    return schedule, fitted


def _report(title: str, timeline: Timeline, color: str) -> str:
    # Drawing loads other rooms, which a comparison does not need.
    from pipemesh.report import to_terminal

    schedule = timeline.schedule
    counts = [
        count_text(schedule.num_devices, "device"),
        count_text(schedule.num_stages, "stage"),
        count_text(schedule.num_microbatches, "microbatch"),
    ]
    if schedule.num_slices > 1:
        counts.append(count_text(schedule.num_slices, "slice"))
    stage_costs = timeline.costs.per_stage(schedule.num_stages)
    shown = stage_costs.durations() | {"transfer": stage_costs.transfer}
    if not schedule.recomputed():
        del shown["R"]
    if timeline.sums:
        shown["gradient sum"] = stage_costs.gradient_sum
    if timeline.fetches:
        shown["all-gather"] = stage_costs.all_gather
    costs = ", ".join(f"{name} {_values(values)}" for name, values in shown.items())
    sums = f", sums of gradients end at {number(timeline.end)}" if timeline.sums else ""
    terminal = sys.stdout.isatty()
    colored = color == "always" or (color == "auto" and terminal and not os.environ.get("NO_COLOR"))
    width = max(40, shutil.get_terminal_size().columns) if terminal else None
    return "\n".join(
        [
            f"{title}: {', '.join(counts)}",
            f"costs a stage: {costs}",
            "",
            to_terminal(timeline, color=colored, width=width),
            "",
            f"makespan {number(timeline.makespan)}, bubble {timeline.bubble_ratio:.1%} (at most "
            f"{number(max(timeline.bubble))} a device), own-span bubble at most "
            f"{number(max(timeline.own_span_bubble))}, "
            f"peak activations {max(timeline.peak_activations)}{sums}",
        ]
    )


def _values(values: tuple[float, ...]) -> str:
    return number(values[0]) if len(set(values)) == 1 else ":".join(map(number, values))


def _write_files(arguments: Flags, title: str, timeline: Timeline) -> None:
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
        if target := arguments.value(option):
            write_output(f"--{option}", target, write())
            print(f"wrote {target}")


class Row(NamedTuple):
    """A schedule and its simulation."""

    name: str
    # Stages a device.
    virtual_stages: int
    timeline: Timeline

    def microbatches(self) -> float:
        """Returns the largest number of microbatches of its share that a device holds."""
        pieces = self.virtual_stages * self.timeline.schedule.num_slices
        return max(self.timeline.peak_activations) / pieces


def fit_costs(costs: Costs, num_devices: int, num_stages: int, num_slices: int = 1) -> Costs:
    """Returns the costs of one model for a number of stages.

    Costs with one value a stage are taken as they are if their length fits. Otherwise they
    describe one stage a device, and each is cut into equal pieces.
    """
    if costs.num_stages not in (None, num_devices) or num_stages % num_devices:
        if costs.num_stages not in (None, num_stages):
            raise ScheduleError(
                f"costs have {costs.num_stages} values, but there are {num_devices} devices and "
                f"{num_stages} stages; give one number, one value a device, or one a stage"
            )
        return costs.refined(1, num_slices)
    return costs.refined(num_stages // num_devices, num_slices)


def compare(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    num_virtual_stages: int | None = None,
    memory_limit: MemoryLimit = None,
) -> tuple[list[Row], dict[str, str]]:
    """Simulates every schedule on the same model, and searches one for each number of stages.

    Costs are of one stage a device. Rows are sorted by makespan, sums of gradients included, and
    memory; of other schedules it returns why they cannot be built.
    """
    rows: list[Row] = []
    reasons: dict[str, str] = {}
    shares: set[int] = set()
    for name in BUILDERS | SLICED:
        known = NAMES[name]
        if not known.trains:
            continue
        virtual_stages = known.stages_a_device
        if known.is_open and num_virtual_stages is not None:
            virtual_stages = num_virtual_stages
        try:
            schedule = build(name, num_devices, num_microbatches, virtual_stages)
            sizes = schedule.num_stages, schedule.num_slices
            fitted = fit_costs(costs, num_devices, *sizes)
        except ScheduleError as error:
            reasons[name] = str(error).splitlines()[0]
            continue
        shares.add(virtual_stages)
        rows.append(Row(name, virtual_stages, simulate(schedule, fitted)))
    for share in sorted(shares):
        fitted = fit_costs(costs, num_devices, num_devices * share)
        limit = scale_limit(memory_limit, share)
        found = list_schedule(fitted, num_devices, num_microbatches, limit, share)
        rows.append(Row("list_schedule", share, simulate(found, fitted)))
    rows.sort(key=lambda row: (round(row.timeline.end, 9), row.microbatches(), row.name))
    return rows, dict(sorted(reasons.items()))


def scale_limit(memory_limit: MemoryLimit, share: int) -> MemoryLimit:
    """Converts a limit in microbatches of a device's share to (stage, microbatch) pairs."""
    if memory_limit is None:
        return None
    if isinstance(memory_limit, int):
        return memory_limit * share
    return [limit * share for limit in memory_limit]


def table(rows: Iterable[Row], reasons: Mapping[str, str]) -> str:
    """Writes a comparison as aligned text.

    The last column says how far a schedule can be at most from the best one on its stages that
    holds no more on any device; see `Timeline.lower_bound`.
    """
    rows = list(rows)
    has_sums = any(row.timeline.sums for row in rows)
    lines = [
        [
            *("schedule", "stages/device", "makespan", *(["with sums"] if has_sums else [])),
            *("bubble", "bubble %", "own-span"),
            *("peak activations", "in microbatches", "above bound"),
        ]
    ]
    for row in rows:
        name, virtual_stages, timeline = row
        lines.append(
            [
                name,
                str(virtual_stages),
                number(timeline.makespan),
                *([number(timeline.end)] if has_sums else []),
                number(max(timeline.bubble)),
                f"{timeline.bubble_ratio:.1%}",
                number(max(timeline.own_span_bubble)),
                str(max(timeline.peak_activations)),
                number(row.microbatches()),
                f"{timeline.above_bound:.1%}",
            ]
        )
    notes = [f"not possible: {name}: {reason}" for name, reason in reasons.items()]
    return "\n".join([*columns(lines), *notes])
