"""How long a step takes on many devices, and what of it is what."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from pipemesh.partition import partition
from pipemesh.plan.layer_figures import LayerFigures
from pipemesh.plan.plan import of_whole_sequences
from pipemesh.scale.job import Job, Split
from pipemesh.schedule import Costs, Schedule, ScheduleSpec, simulate

# Microbatches a place, and in any case, after which each takes as long as the one before.
_STEADY, _AT_LEAST = 4, 64


@dataclasses.dataclass(frozen=True)
class Step:
    """What is forecast of a step.

    Attributes:
        split: how devices share it.
        seconds: of the whole step.
        parts: by name the seconds that each thing adds to it: `compute`, all work evenly spread;
            `actions`, what actions take beside it; `bubble`; `imbalance` of the stages; `sums` of
            devices that share layers; `transfers` between stages; `gradients` of replicas;
            `optimizer`; `fixed`, what belongs to no device.
        bubble: the share of the time of the pipeline that devices idle.
        memory: bytes of the fullest device.
    """

    split: Split
    seconds: float
    parts: dict[str, float]
    bubble: float
    memory: float

    @property
    def binds(self) -> str:
        """What takes most besides computing."""
        others = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(others, key=others.__getitem__)


def forecast_step(job: Job, split: Split) -> Step:
    """Simulates a step, with and without what makes it longer.

    Slices of a layer are neighbours, then come replicas, then stages, as
    `pipemesh.plan.hosts.over_hosts` lays them. A transfer keeps no device busy; sums of devices
    that share a layer keep all of them waiting. Gradients of replicas are added up, and weights
    handed out again, when a device has done its last action; each replica updates its share.

    Args:
        job: what is trained, on what.
        split: how devices share it; it fits the job, see `splits`.

    Raises:
        PipemeshError: the layers cannot be cut so, or the schedule cannot be had.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.layer_figures import figures_of_costs
        >>> from pipemesh.plan.network import Link, Network
        >>> layers = figures_of_costs([LayerCost(1.0)] * 4, rows=1)
        >>> link = Link(0.0, 1e9)
        >>> job = Job(tuple(layers), Network(8, link, link), batch=8)
        >>> step = forecast_step(job, Split(layers=4, num_microbatches=8))
        >>> step.seconds, step.parts["compute"], step.parts["bubble"], step.binds
        (33.0, 24.0, 9.0, 'bubble')
    """
    table = _table(split.schedule, split.layers, split.num_microbatches)
    rows = job.batch / split.data / split.num_microbatches
    stages = _stages(job, table.num_stages, rows, split)
    run = _run(job, split, stages, rows, table)
    if (number := split.num_microbatches) > table.num_microbatches:
        # In the steady state each microbatch adds as much as the one before.
        half = _table(split.schedule, split.layers, table.num_microbatches // 2)
        before = _run(job, split, stages, rows, half)
        run = run.beyond(before, number, table.num_microbatches, half.num_microbatches)
    tails = [_tail(job, stages, split, table, device) for device in range(split.layers)]
    with_gradients = max(end + tail[0] for end, tail in zip(run.ends, tails, strict=True))
    with_optimizer = max(end + sum(tail) for end, tail in zip(run.ends, tails, strict=True))
    even, cut, summed, sent = run.lengths
    parts = {
        "compute": run.work - run.actions,
        "actions": run.actions,
        # Some tables are shorter for stages that are not equal.
        "bubble": min(even, cut) - run.work,
        "imbalance": max(0.0, cut - even),
        "sums": summed - cut,
        "transfers": sent - summed,
        "gradients": with_gradients - sent,
        "optimizer": with_optimizer - with_gradients,
        "fixed": job.fixed,
    }
    return Step(
        split,
        with_optimizer + job.fixed,
        parts,
        max(0.0, 1 - run.busy / sent),
        _memory(job, stages, rows, split, table, run.in_flight),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """What simulations of a table say.

    Attributes:
        lengths: makespans with equal stages, with those there are, with sums, with transfers.
        work: of a device on average, with equal stages.
        busy: of a device on average, with all.
        actions: what its actions take beside their layers.
        ends: of each device, when its last action ends.
        in_flight: of each stage, as `Timeline.in_flight`.
    """

    lengths: tuple[float, ...]
    work: float
    busy: float
    actions: float
    ends: tuple[float, ...]
    in_flight: tuple[float, ...]

    def beyond(self, before: _Run, number: int, here: int, there: int) -> _Run:
        """The same for more microbatches, by the line through here and an earlier number."""

        def on(a: float, b: float) -> float:
            return a + (a - b) * (number - here) / (here - there)

        def on_all(a: Sequence[float], b: Sequence[float]) -> tuple[float, ...]:
            return tuple(map(on, a, b))

        return _Run(
            on_all(self.lengths, before.lengths),
            on(self.work, before.work),
            on(self.busy, before.busy),
            on(self.actions, before.actions),
            on_all(self.ends, before.ends),
            on_all(self.in_flight, before.in_flight),
        )


def _run(
    job: Job,
    split: Split,
    stages: Sequence[Sequence[LayerFigures]],
    rows: float,
    table: Schedule,
) -> _Run:
    work = _costs(job, stages, rows, split)
    even = _evenly(work, table.num_stages)
    summed = _costs(job, stages, rows, split, sums=True)
    sent = dataclasses.replace(summed, transfer=_transfers(job, stages, rows, split, table))
    timelines = [simulate(table, costs) for costs in (even, work, summed, sent)]
    last, places = timelines[-1], split.layers
    return _Run(
        tuple(timeline.makespan for timeline in timelines),
        sum(timelines[0].busy) / places,
        sum(last.busy) / places,
        sum(map(len, table.rows)) * job.action / places,
        tuple(row[-1] for row in last.ends),
        last.in_flight,
    )


def _table(schedule: str, places: int, num_microbatches: int) -> Schedule:
    """The table, of so many microbatches as show its steady state."""
    # Of even numbers of rounds, so that half as many can be had, too.
    most = max(_STEADY, 2 * -(-_AT_LEAST // (2 * places))) * places
    number = num_microbatches if num_microbatches <= most else most
    return _built(schedule, places, number)


@functools.lru_cache(maxsize=64)
def _built(schedule: str, places: int, num_microbatches: int) -> Schedule:
    return of_whole_sequences(ScheduleSpec.from_text(schedule).build(places, num_microbatches))


def _stages(job: Job, number: int, rows: float, split: Split) -> list[tuple[LayerFigures, ...]]:
    """The layers of each stage, cut so that the longest takes least."""
    costs = [
        _alone(layer, "F", rows, split) + _alone(layer, "B", rows, split) for layer in job.layers
    ]
    cuts = _boundaries(tuple(costs), number)
    return [job.layers[a:b] for a, b in itertools.pairwise(cuts)]


@functools.lru_cache(maxsize=256)
def _boundaries(costs: tuple[float, ...], number: int) -> tuple[int, ...]:
    return partition(list(costs), number).boundaries


def _alone(layer: LayerFigures, kind: str, rows: float, split: Split) -> float:
    """What a device takes for its slice of a layer."""
    shared = min(split.model, layer.split)
    return layer.takes(kind, rows / shared, split.again and kind != "F")


def _costs(
    job: Job,
    stages: Sequence[Sequence[LayerFigures]],
    rows: float,
    split: Split,
    sums: bool = False,
) -> Costs:
    def of(kind: str) -> list[float]:
        # As many sums in the gradient of the input as forward, and the forward ones once more
        # where they are computed again.
        times = {"F": 1, "W": 0}.get(kind, 2 if split.again else 1) if sums else 0
        return [
            job.action
            + sum(
                _alone(layer, kind, rows, split) + times * _sum(job, layer, rows, split)
                for layer in stage
            )
            for stage in stages
        ]

    return Costs(of("F"), of("B"), of("I"), of("W"))


def _sum(job: Job, layer: LayerFigures, rows: float, split: Split) -> float:
    shared = min(split.model, layer.split)
    if shared == 1 or layer.summed is None:
        return 0.0
    size = layer.summed.at(rows) / layer.sums
    return layer.sums * job.network.all_reduce(shared, 1, size)


def _evenly(costs: Costs, number: int) -> Costs:
    """All work spread evenly over the stages."""
    each = costs.per_stage(number)
    forward, backward, input_grad, weight_grad = (
        sum(of) / number for of in (each.forward, each.backward, each.input_grad, each.weight_grad)
    )
    return Costs(forward, backward, input_grad, weight_grad)


def _transfers(
    job: Job,
    stages: Sequence[Sequence[LayerFigures]],
    rows: float,
    split: Split,
    table: Schedule,
) -> list[float]:
    """Over the boundary above each stage; each slice goes to its own in the next home."""
    home, host = split.data * split.model, job.network.host_size
    found: list[float] = []
    for stage, layers in enumerate(stages):
        here = table.stage_devices[stage]
        there = table.stage_devices[min(stage + 1, len(stages) - 1)]
        is_near = all(
            (here * home + i) // host == (there * home + i) // host for i in (0, home - 1)
        )
        link = job.network.inside if is_near else job.network.between
        found.append(link.seconds(layers[-1].outputs.at(rows)))
    return found


def _weights(stages: Sequence[Sequence[LayerFigures]], split: Split, own: Sequence[int]) -> float:
    """Bytes of a device's slices of its stages' weights."""
    return sum(
        layer.parameter_bytes / min(split.model, layer.split)
        for stage in own
        for layer in stages[stage]
    )


def _own(table: Schedule, device: int) -> list[int]:
    return [stage for stage, owner in enumerate(table.stage_devices) if owner == device]


def _tail(
    job: Job,
    stages: Sequence[Sequence[LayerFigures]],
    split: Split,
    table: Schedule,
    device: int,
) -> tuple[float, float]:
    """What a device does after its last action: the sum of gradients, and the update."""
    size = _weights(stages, split, _own(table, device))
    reduced = job.network.all_reduce(split.data, split.model, size)
    return reduced, size / split.data * job.update


def _memory(
    job: Job,
    stages: Sequence[Sequence[LayerFigures]],
    rows: float,
    split: Split,
    table: Schedule,
    in_flight: Sequence[float],
) -> float:
    """Of the fullest device: weights, gradients, the optimizer's share, and activations."""
    fullest = 0.0
    for device in range(split.layers):
        own = _own(table, device)
        weights = _weights(stages, split, own)
        held = working = 0.0
        for stage in own:
            kept = sum(
                layer.kept.at(rows) / min(split.model, layer.split) for layer in stages[stage]
            )
            before = stages[stage - 1][-1].outputs if stage else stages[0][0].outputs
            each = before.at(rows) if split.again else kept
            held += in_flight[stage] * each
            # While an action computes its stage again it has all of that, too.
            working = max(working, kept if split.again else 0.0)
        fullest = max(fullest, weights * (2 + job.optimizer / split.data) + held + working)
    return fullest
