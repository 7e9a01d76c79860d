"""What the actions of a plan's stages take, from the figures of their layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from pipemesh.errors import PartitionError, PlanError
from pipemesh.partition import partition
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import LayerFigures
from pipemesh.plan.network import Link
from pipemesh.plan.places import home_of
from pipemesh.plan.plan import Plan
from pipemesh.schedule import Costs, Schedule
from pipemesh.schedule.action import KINDS


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a plan, and how its devices share them.

    Attributes:
        layers: figures of the layers of each stage.
        rows: of a microbatch that a replica gets.
        replicas: how many there are.
        group: devices that share a replica's part of a stage.
        again: whether backward passes compute the forward pass again.
        table: the schedule.
    """

    layers: tuple[tuple[LayerFigures, ...], ...]
    rows: float
    replicas: int
    group: int
    again: bool
    table: Schedule

    @functools.cached_property
    def run(self) -> Schedule:
        """The schedule with an `R` before each backward action that computes again.

        It needs no gradient, so a device that waits for one does it meanwhile.
        """
        if not self.again:
            return self.table
        rows = [
            [
                each
                for action in row
                for each in ([action.also("R")] if action.kind in "BI" else []) + [action]
            ]
            for row in self.table.rows
        ]
        return dataclasses.replace(self.table, rows=tuple(map(tuple, rows)))

    def shared(self, layer: LayerFigures) -> int:
        """Among how many devices of a replica a layer is split."""
        return min(self.group, layer.split)

    def weights(self, stage: int) -> float:
        """Bytes of a device's slices of a stage's weights."""
        return sum(layer.parameter_bytes / self.shared(layer) for layer in self.layers[stage])

    def given(self, stage: int) -> float:
        """Bytes of a stage's inputs on a device, of a microbatch."""
        if not stage:
            return 0.0
        return self.layers[stage - 1][-1].outputs.at(self.rows)


def stages_of(plan: Plan, figures: Figures, batch: int) -> Stages:
    """The stages of a plan.

    Args:
        plan: with boundaries, or else its layers are cut into stages of equal seconds.
        figures: of the layers.
        batch: rows of a batch.

    Raises:
        PlanError: the batch or the layers cannot be cut so, or nothing is known of such a plan.
    """
    if plan.lowering != "placement":
        raise PlanError(
            f"lowering={plan.lowering} has no actions, of which forecasts are made; use "
            "lowering=placement"
        )
    if not plan.mesh.is_even:
        raise PlanError(
            f"mesh '{plan.mesh}' has homes of different sizes, of which no forecast is made; give "
            "each axis one size"
        )
    plan.check_batch(batch)
    plan.check_layers(len(figures.layers))
    replicas = plan.num_replicas
    rows = batch / plan.num_microbatches / replicas
    group = len(home_of(plan.mesh, plan.layout, 0)) // replicas
    again = plan.remat in ("full", "except_last", "custom")
    cuts = plan.boundaries
    if cuts is None:
        costs = layer_seconds(figures, rows, group, again)
        cuts = cut_evenly(tuple(costs), plan.table.stage_devices)
    layers = tuple(figures.layers[a:b] for a, b in itertools.pairwise(cuts))
    return Stages(layers, rows, replicas, group, again, plan.table)


def layer_seconds(figures: Figures, rows: float, group: int, again: bool) -> list[float]:
    """What each layer takes of a device for a microbatch, forward and backward.

    Args:
        figures: of the layers.
        rows: that a replica gets.
        group: devices that share it.
        again: whether the backward pass computes the forward pass again.
    """
    found: list[float] = []
    for layer in figures.layers:
        whole = layer.takes("F", rows) + layer.takes("B", rows, again)
        found.append(whole / min(group, layer.split))
    return found


@functools.lru_cache(maxsize=1024)
def cut_evenly(costs: tuple[float, ...], stage_devices: tuple[int, ...]) -> tuple[int, ...]:
    """Boundaries for which the busiest device does least.

    Args:
        costs: of the layers.
        stage_devices: of each stage.

    Example:
        >>> cut_evenly((1.0, 1.0, 1.0, 3.0), (0, 1))
        (0, 3, 4)
    """
    number = len(stage_devices)
    if len(set(stage_devices)) == number:
        return partition(list(costs), number).boundaries
    try:
        return partition(list(costs), number, stage_devices=list(stage_devices)).boundaries
    except PartitionError:
        # The search of devices with several stages grows too large for many layers.
        return partition(list(costs), number).boundaries


def action_costs(
    stages: Stages, figures: Figures, *, sums: bool = True, transfers: bool = True
) -> Costs:
    """Durations of the actions of each stage, of one that runs alone.

    What is computed again is the `R` of `Stages.run`, and no action has overhead of it.

    Args:
        stages: of the plan.
        figures: of the layers.
        sums: whether sums of devices that share layers count.
        transfers: whether transfers between stages count.
    """

    def of(kind: str) -> list[float]:
        return [
            (figures.action if kind != "R" else 0.0)
            + sum(
                _takes(layer, layer.takes, kind, stages.rows, layer is layers[-1])
                / stages.shared(layer)
                + (_sum(stages, figures, layer, kind)[0] if sums else 0.0)
                for layer in layers
            )
            for layers in stages.layers
        ]

    sent = [0.0] * len(stages.layers)
    if transfers:
        sent = [
            figures.transfer.seconds(layers[-1].outputs.at(stages.rows)) for layers in stages.layers
        ]
    return Costs(of("F"), of("B"), of("I"), of("W"), sent, of("R"))


def action_loads(
    stages: Stages, figures: Figures, costs: Costs, *, sums: bool = True
) -> dict[str, list[float]]:
    """By kind of action, for each stage, how many cores one on one device keeps busy alone.

    Args:
        stages: of the plan.
        figures: of the layers.
        costs: what actions take, of the same stages, with or without sums.
        sums: whether they have sums.
    """
    durations = costs.per_stage(len(stages.layers)).durations()

    def load(kind: str, stage: int) -> float:
        took = durations[kind][stage]
        layers = stages.layers[stage]
        if not took or not any(layer.work for layer in layers):
            return figures.loads.get("F" if kind == "R" else kind, 1.0)
        # What actions take besides keeps a core busy.
        more = 0.0
        for layer in layers:
            is_last = layer is layers[-1]
            done = _takes(layer, layer.computes, kind, stages.rows, is_last)
            alone = _takes(layer, layer.takes, kind, stages.rows, is_last)
            more += (done - alone) / stages.shared(layer)
            if sums:
                seconds, work = _sum(stages, figures, layer, kind)
                more += work - seconds
        return max(0.0, 1 + more / took)

    return {kind: [load(kind, s) for s in range(len(stages.layers))] for kind in KINDS}


def _takes(
    layer: LayerFigures,
    of: Callable[[str, float, bool], float],
    kind: str,
    rows: float,
    is_last: bool,
) -> float:
    """What a layer takes for an action, or computes for it; whether it is the last of its stage."""
    if kind != "R":
        return of(kind, rows, False)
    return (of("B", rows, True) - of("B", rows, False)) * (layer.again if is_last else 1.0)


def even_loads(
    loads: Mapping[str, Sequence[float]], costs: Costs, number: int
) -> dict[str, list[float]]:
    """Loads of stages of equal length that compute as much as the stages that there are.

    Args:
        loads: of each stage.
        costs: of each stage.
        number: of stages.
    """
    durations = costs.per_stage(number).durations()

    def mean(kind: str) -> float:
        took = sum(durations[kind])
        done = sum(map(operator.mul, durations[kind], loads[kind]))
        return done / took if took else 1.0

    return {kind: [mean(kind)] * number for kind in loads}


def _sum(stages: Stages, figures: Figures, layer: LayerFigures, kind: str) -> tuple[float, float]:
    """What an action takes because a layer is shared, and what each device computes for that."""
    shared = stages.shared(layer)
    if shared == 1 or layer.summed is None or kind == "W":
        return 0.0, 0.0
    size = layer.summed.at(stages.rows) / layer.sums
    seconds, work = summed(figures.sums or figures.transfer, figures, shared, size)
    return layer.sums * seconds, layer.sums * work


def summed(link: Link, figures: Figures, members: int, size: float) -> tuple[float, float]:
    """What a sum takes that all members of a group get, and what each of them computes for it.

    Devices that share cores share memory, too: they add pairs up a tree, and copy nothing.

    Args:
        link: between two devices.
        figures: that say whether devices share cores.
        members: of the group.
        size: what each puts in, in bytes.
    """
    if figures.cores is None or members == 1 or not size:
        seconds = link.all_reduce(members, size)
        return seconds, seconds
    pair = link.seconds(size)
    return math.ceil(math.log2(members)) * pair, (members - 1) / members * pair


def even_costs(costs: Costs, number: int) -> Costs:
    """The same work in stages of equal length, which wait for no transfer.

    Args:
        costs: of each stage.
        number: of stages.
    """
    each = costs.per_stage(number)
    fields: Sequence[tuple[float, ...]] = (
        each.forward,
        each.backward,
        each.input_grad,
        each.weight_grad,
        each.recompute,
    )
    forward, backward, input_grad, weight_grad, again = (sum(field) / number for field in fields)
    return Costs(forward, backward, input_grad, weight_grad, recompute=again)
