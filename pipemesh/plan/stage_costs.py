"""What the actions of a plan's stages take, from the figures of their layers."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence

from pipemesh.errors import PartitionError, PlanError
from pipemesh.partition import partition
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import LayerFigures
from pipemesh.plan.places import home_of
from pipemesh.plan.plan import Plan
from pipemesh.schedule import Costs, Schedule


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

    def shared(self, layer: LayerFigures) -> int:
        """Among how many devices of a replica a layer is split."""
        return min(self.group, layer.split)

    def weights(self, stage: int) -> float:
        """Bytes of a device's slices of a stage's weights."""
        return sum(layer.parameter_bytes / self.shared(layer) for layer in self.layers[stage])

    def kept(self, stage: int) -> float:
        """Bytes that a device keeps of a microbatch, if nothing is computed again."""
        return sum(layer.holds(self.rows, self.shared(layer)) for layer in self.layers[stage])

    def pending(self, stage: int) -> float:
        """Bytes that a device keeps of a microbatch between an `I` and its `W`."""
        return sum(layer.holds(self.rows, self.shared(layer), True) for layer in self.layers[stage])

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
        slice_ = rows / min(group, layer.split)
        found.append(layer.takes("F", slice_) + layer.takes("B", slice_, again))
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

    Args:
        stages: of the plan.
        figures: of the layers.
        sums: whether sums of devices that share layers count.
        transfers: whether transfers between stages count.
    """

    def of(kind: str) -> list[float]:
        again = stages.again and kind != "F"
        times = {"F": 1, "W": 0}.get(kind, 2 if stages.again else 1) if sums else 0
        return [
            figures.action
            + sum(
                layer.takes(kind, stages.rows / stages.shared(layer), again)
                + times * _sum(stages, figures, layer)
                for layer in layers
            )
            for layers in stages.layers
        ]

    sent = [0.0] * len(stages.layers)
    if transfers:
        sent = [
            figures.transfer.seconds(layers[-1].outputs.at(stages.rows)) for layers in stages.layers
        ]
    return Costs(of("F"), of("B"), of("I"), of("W"), sent)


def _sum(stages: Stages, figures: Figures, layer: LayerFigures) -> float:
    shared = stages.shared(layer)
    if shared == 1 or layer.summed is None:
        return 0.0
    size = layer.summed.at(stages.rows) / layer.sums
    return layer.sums * figures.transfer.all_reduce(shared, size)


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
    )
    return Costs(*(sum(field) / number for field in fields))
