"""An automatic schedule for given costs and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.blocks import even_blocks
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.checks import check_counts, check_number
from pipemesh.schedule.costs import Costs
from pipemesh.schedule.greedy import Policy, greedy
from pipemesh.schedule.improve import improve
from pipemesh.schedule.problem import MemoryLimit, limits_of, placements_of
from pipemesh.schedule.repeat import repeated
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.timeline import Timeline, peak_of_row
from pipemesh.schedule.validate import validate

# How many actions the search may walk over in greedy runs, and again in small changes.
_BUDGET = 1_000_000
_FEWEST_RUNS = 8
_MOST_BLOCKS = 24


def list_schedule(
    costs: Costs,
    num_devices: int,
    num_microbatches: int,
    memory_limit: MemoryLimit = None,
    num_virtual_stages: int | None = None,
    *,
    stage_devices: Sequence[int] | None = None,
    effort: int = 300,
) -> Schedule:
    """Searches a short schedule within a memory limit.

    Three steps. First, candidates: every schedule of this package with as many stages a device
    that keeps within the limit; with one or two stages a device the even blocks that fit, repeated
    (`pipemesh.schedule.blocks`); and greedy runs in which each free device takes the best ready
    action by one of several rules (backwards or forwards first or in turn, later or earlier stage
    first, weight gradients at once or only where they delay nothing, several caps on what is held).
    With two stages a device all that both on a loop and on a V. Second, the shortest one wins;
    ties go to the one that holds less. Third, small changes along its critical path, as long as
    they help.

    The result is therefore never longer than any published schedule on the same stages that fits
    into the memory. How far it can be from the optimum says `Timeline.above_bound`: with equal
    costs, 8 devices, 32 microbatches and 1F1B's memory it is the optimum, on one stage a device,
    on a loop of two and on a V. `optimal_schedule` closes what is left for small problems. The
    search is deterministic. The larger the table, the fewer rules and changes it tries: about a
    second for 3,000 actions, some twenty for 50,000.

    Args:
        costs: durations and transfer times; with one value a stage they also say how many
            stages there are.
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        memory_limit: the most (stage, microbatch) pairs that a device may hold, in the sense of
            `Timeline.peak_activations`: one number or one a device, at least the number of the
            device's stages. None for no limit.
        num_virtual_stages: stages a device; by default what `costs` say, else 1.
        stage_devices: for each stage its device, to fix the placement.
        effort: how many small changes are tried at most, 0 for none.

    Returns:
        A validated schedule.

    Raises:
        ScheduleError: a count is below 1, the costs do not fit the stages, or a limit is below
            the number of stages of its device.

    Example:
        >>> from pipemesh.schedule import Costs, list_schedule, one_f_one_b, simulate
        >>> slow_end = Costs(forward=[1, 1, 1, 2])
        >>> found = list_schedule(slow_end, num_devices=4, num_microbatches=8, memory_limit=4)
        >>> simulate(found, slow_end).makespan < simulate(one_f_one_b(4, 8), slow_end).makespan
        True
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    placements = placements_of(costs, num_devices, num_virtual_stages, stage_devices)
    num_stages = len(placements[0])
    costs.per_stage(num_stages)  # Fails early, naming the cost that does not fit.
    limits = limits_of(memory_limit, placements[0], num_devices, num_microbatches)
    best: Timeline | None = None
    for schedule in _candidates(costs, placements, num_microbatches, limits):
        if any(peak_of_row(row) > limit for row, limit in zip(schedule.rows, limits, strict=True)):
            continue
        timeline = simulate(schedule, costs)
        if best is None or _score(timeline) < _score(best):
            best = timeline
    assert best is not None, "one microbatch at a time always fits"
    trials = min(int(check_number("effort", effort)), _BUDGET // sum(map(len, best.schedule.rows)))
    return validate(improve(best.schedule, costs, limits, trials))


def _score(timeline: Timeline) -> tuple[float, int]:
    # Round-off must not decide between equally long schedules.
    return (round(timeline.makespan, 9), sum(timeline.peak_activations))


def _candidates(
    costs: Costs,
    placements: Sequence[tuple[int, ...]],
    num_microbatches: int,
    limits: tuple[int, ...],
) -> Iterator[Schedule]:
    num_devices = len(limits)
    num_stages = len(placements[0])
    yield _one_at_a_time(placements[0], num_devices, num_microbatches)
    for name, builder in BUILDERS.items():
        virtual_stages = num_stages // num_devices
        if not builder.trains or not (
            builder.takes_virtual_stages or builder.virtual_stages == virtual_stages
        ):
            continue
        try:
            schedule = build(name, num_devices, num_microbatches, virtual_stages)
        except ScheduleError:
            continue  # This schedule demands another number of microbatches.
        if schedule.stage_devices in placements:
            yield schedule
    blocks = min(_MOST_BLOCKS, _BUDGET // (10 * num_stages * num_microbatches))
    for placement in placements if blocks else ():
        for period, offsets in even_blocks(placement, num_devices, limits, blocks):
            yield from repeated(placement, offsets, period, num_microbatches, limits)
    stage_costs = costs.per_stage(num_stages)
    runs = max(_FEWEST_RUNS, _BUDGET // (3 * num_stages * num_microbatches))
    policies = zip(*(_policies(limits, placement) for placement in placements), strict=True)
    chosen = ((p, placements[i]) for row in policies for i, p in enumerate(row))
    for policy, placement in islice(chosen, runs):
        rows = greedy(stage_costs, placement, num_microbatches, policy)
        if rows is not None:
            yield Schedule(tuple(map(tuple, rows)), placement, num_microbatches)


def _policies(limits: tuple[int, ...], placement: tuple[int, ...]) -> Iterator[Policy]:
    num_devices = len(limits)
    most = range(num_devices)
    share = len(placement) // num_devices
    least = [placement.count(device) for device in most]
    wishes = [
        limits,
        tuple(share * num_devices for _ in most),
        tuple(share * (num_devices - d) for d in most),
        tuple(2 * share * num_devices for _ in most),
        tuple((share + 1) * num_devices for _ in most),
    ]
    caps = dict.fromkeys(
        tuple(max(min(cap), floor) for *cap, floor in zip(row, limits, least, strict=True))
        for row in wishes
    )
    deep = (True, False) if share > 1 else (True,)
    # The most different rules first, for a search that may not try them all.
    for patient, deep_first, prefer, cap in product(
        (True, False), deep, ("I", "alternate", "F"), caps
    ):
        yield Policy(prefer, deep_first, patient, cap)


def _one_at_a_time(
    stage_devices: tuple[int, ...], num_devices: int, num_microbatches: int
) -> Schedule:
    """No pipelining at all: what is left when the memory holds one microbatch."""
    stages = range(len(stage_devices))
    rows = tuple(
        tuple(
            action
            for m in range(num_microbatches)
            for action in (
                *(Action(s, "F", m) for s in stages if stage_devices[s] == device),
                *(Action(s, "B", m) for s in reversed(stages) if stage_devices[s] == device),
            )
        )
        for device in range(num_devices)
    )
    return Schedule(rows, stage_devices, num_microbatches)
