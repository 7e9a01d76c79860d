"""One row a schedule: how they compare on one model."""

from __future__ import annotations

import dataclasses

from pipemesh.errors import ScheduleError
from pipemesh.schedule.builders import BUILDERS, SLICED, build
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.list_schedule import MemoryLimit, list_schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.timeline import Timeline
from pipemesh.text import columns, number


@dataclasses.dataclass(frozen=True)
class Row:
    """A schedule and how it does, or why it cannot be had.

    Attributes:
        name: of the builder, or `list_schedule`.
        virtual_stages: stages a device.
        timeline: its simulation; None if there is none.
        reason: why there is none.
    """

    name: str
    virtual_stages: int
    timeline: Timeline | None
    reason: str = ""


def fit_costs(costs: Costs, num_devices: int, num_stages: int, num_slices: int = 1) -> Costs:
    """The costs of one model, told for a number of stages.

    Costs with one value a stage are taken as they are if their length fits. Otherwise they
    describe one stage a device, and each is cut into equal pieces.

    Args:
        costs: of one stage a device, or of every stage.
        num_devices: how many devices there are.
        num_stages: how many stages there are.
        num_slices: into how many slices sequences are cut; the costs are of whole ones.

    Returns:
        Costs for that many stages and, if there are slices, of a slice.

    Raises:
        ScheduleError: the length of the costs fits neither devices nor stages.

    Example:
        >>> fit_costs(Costs(forward=2), num_devices=4, num_stages=8).forward
        1.0
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
) -> list[Row]:
    """Simulates every schedule on the same model, and searches one for each number of stages.

    Args:
        costs: of one stage a device; schedules with several cut it, see `fit_costs`.
        num_devices: at least 1.
        num_microbatches: at least 1.
        num_virtual_stages: for schedules that leave it open; by default their own default.
        memory_limit: of the searched schedules: how many microbatches' activations of its
            whole share of the model a device may hold; one number or one a device.

    Returns:
        Shortest first, then least memory; schedules that cannot be built come last.

    Example:
        >>> compare(Costs(), 2, 4)[0].timeline.makespan <= 13
        True
    """
    rows: list[Row] = []
    shares: set[int] = set()
    for name, builder in (BUILDERS | SLICED).items():
        if not builder.trains:
            continue
        virtual_stages = builder.virtual_stages
        if builder.takes_virtual_stages and num_virtual_stages is not None:
            virtual_stages = num_virtual_stages
        try:
            schedule = build(name, num_devices, num_microbatches, virtual_stages)
            sizes = schedule.num_stages, schedule.num_slices
            fitted = fit_costs(costs, num_devices, *sizes)
        except ScheduleError as error:
            rows.append(Row(name, virtual_stages, None, str(error).splitlines()[0]))
            continue
        shares.add(virtual_stages)
        rows.append(Row(name, virtual_stages, simulate(schedule, fitted)))
    for share in sorted(shares):
        fitted = fit_costs(costs, num_devices, num_devices * share)
        limit = scale_limit(memory_limit, share)
        found = list_schedule(fitted, num_devices, num_microbatches, limit, share)
        rows.append(Row("list_schedule", share, simulate(found, fitted)))
    return sorted(rows, key=_order)


def scale_limit(memory_limit: MemoryLimit, share: int) -> MemoryLimit:
    """A limit in microbatches of a device's whole share, as one in (stage, microbatch) pairs.

    Example:
        >>> scale_limit(4, share=2)
        8
    """
    if memory_limit is None:
        return None
    if isinstance(memory_limit, int):
        return memory_limit * share
    return [limit * share for limit in memory_limit]


def _order(row: Row) -> tuple[float, float, str]:
    if row.timeline is None:
        return (float("inf"), 0.0, row.name)
    return (round(row.timeline.makespan, 9), _microbatches(row, row.timeline), row.name)


def _microbatches(row: Row, timeline: Timeline) -> float:
    """How many microbatches of its share of the model a device holds at most."""
    pieces = row.virtual_stages * timeline.schedule.num_slices
    return max(timeline.peak_activations) / pieces


def table(rows: list[Row]) -> str:
    """Writes the comparison as aligned text.

    The last column says how far a schedule can be at most from the best one on its stages that
    holds no more on any device; see `Timeline.lower_bound`.

    Args:
        rows: what `compare` returned.

    Returns:
        A header, one line a schedule, and a note for each that cannot be built.

    Example:
        >>> print(table(compare(Costs(), 1, 1)).splitlines()[0].split()[:2])
        ['schedule', 'stages/device']
    """
    lines = [
        [
            "schedule",
            "stages/device",
            "makespan",
            "bubble",
            "bubble %",
            "own-span",
            "peak activations",
            "in microbatches",
            "above bound",
        ]
    ]
    notes: list[str] = []
    for row in rows:
        if row.timeline is None:
            notes.append(f"not possible: {row.name}: {row.reason}")
            continue
        timeline = row.timeline
        peak = max(timeline.peak_activations)
        lines.append(
            [
                row.name,
                str(row.virtual_stages),
                number(timeline.makespan),
                number(max(timeline.bubble)),
                f"{timeline.bubble_ratio:.1%}",
                number(max(timeline.own_span_bubble)),
                str(peak),
                number(_microbatches(row, timeline)),
                f"{timeline.above_bound:.1%}",
            ]
        )
    return "\n".join(columns(lines) + notes)
