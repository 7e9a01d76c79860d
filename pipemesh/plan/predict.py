"""How long a step under a plan takes, what it holds, and what binds it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from pipemesh.plan.figures import Figures
from pipemesh.plan.plan import Plan
from pipemesh.plan.stage_costs import (
    Stages,
    action_costs,
    action_loads,
    even_costs,
    even_loads,
    stages_of,
    summed,
)
from pipemesh.plan.stage_memory import device_memory
from pipemesh.schedule import Costs, Timeline, simulate, simulate_sharing

_Loads = Mapping[str, Sequence[float]]


@dataclasses.dataclass(frozen=True)
class Prediction:
    """What is expected of a step.

    Attributes:
        plan: that it runs under.
        seconds: of the whole step.
        bubble: the share of their time that devices wait for each other.
        memory: bytes of each place along `layers`, of one device there.
        work: seconds of a step that all devices compute, added up: what their cores do, however
            they share them.
        parts: by name the seconds that each thing adds to the step; none unless they are asked
            for. `compute`, the work spread evenly over all devices or cores; `actions`, what
            actions take beside it; `bubble`; `imbalance` of the stages; `sums` of devices that
            share layers; `transfers`; `gradients` of replicas; `optimizer`; `fixed`.
    """

    plan: Plan
    seconds: float
    bubble: float
    memory: tuple[float, ...]
    work: float = 0.0
    parts: dict[str, float] = dataclasses.field(default_factory=dict[str, float])

    @property
    def binds(self) -> str:
        """What takes most besides computing; "" if the parts were not asked for."""
        others = {name: value for name, value in self.parts.items() if name != "compute"}
        return max(others, key=others.__getitem__) if others else ""


def predict(plan: Plan, figures: Figures, batch: int, *, parts: bool = True) -> Prediction:
    """What is expected of a step under a plan.

    The schedule is simulated with what was measured of the layers. Where devices share cores they
    slow each other down (`pipemesh.schedule.simulate_sharing`).

    Args:
        plan: how it is run.
        figures: of the model's layers on the machine.
        batch: rows of a batch.
        parts: whether it is to be said what the step is made of, for three more simulations.

    Raises:
        PlanError: the batch or the layers cannot be cut so, or nothing is known of such a plan.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.layer_figures import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 4, rows=1)))
        >>> found = predict(Plan("layers:2", num_microbatches=4, remat="none"), figures, batch=4)
        >>> found.seconds, found.parts["bubble"], found.binds
        (30.0, 6.0, 'bubble')
    """
    stages = stages_of(plan, figures, batch)
    costs = action_costs(stages, figures)
    loads = action_loads(stages, figures, costs)
    timeline = _simulated(stages, figures, costs, loads)
    gradients, update, after = _tails(stages, figures)
    places = range(plan.mesh.num_stages)
    ends = [timeline.ends[place][-1] for place in places]
    with_gradients = max(end + gradients[place] for place, end in enumerate(ends))
    seconds = with_gradients + update + figures.fixed
    memory = tuple(device_memory(stages, figures, place) for place in places)
    bubble = _waiting(timeline, stages, figures, loads)
    done = _home(stages) * (_work(timeline, loads) + after) + figures.fixed
    if not parts:
        return Prediction(plan, seconds, bubble, memory, done)
    work = action_costs(stages, figures, sums=False, transfers=False)
    added = action_costs(stages, figures, transfers=False)
    even = even_costs(work, plan.num_stages)
    loads = action_loads(stages, figures, work, sums=False)
    alike = even_loads(loads, work, plan.num_stages)
    lengths = [
        _simulated(stages, figures, even, alike).makespan,
        _simulated(stages, figures, work, loads).makespan,
        _simulated(stages, figures, added, action_loads(stages, figures, added)).makespan,
    ]
    lone = simulate(stages.run, even)
    total = sum(lone.busy) / len(lone.busy)
    actions = sum(map(len, stages.table.rows)) * figures.action / len(lone.busy)
    # With fewer cores than are wanted all of them compute at once.
    scale = _slowed(lone, stages, figures, alike)
    found = {
        "compute": (total - actions) * scale,
        "actions": actions * scale,
        # Some tables are shorter for stages that are not equal.
        "bubble": min(lengths[:2]) - total * scale,
        "imbalance": max(0.0, lengths[1] - lengths[0]),
        "sums": lengths[2] - lengths[1],
        "transfers": timeline.makespan - lengths[2],
        "gradients": with_gradients - timeline.makespan,
        "optimizer": update,
        "fixed": figures.fixed,
    }
    return Prediction(plan, seconds, bubble, memory, done, found)


def _home(stages: Stages) -> int:
    """Devices of a home, which all run each action."""
    return stages.replicas * stages.group


def _simulated(stages: Stages, figures: Figures, costs: Costs, loads: _Loads) -> Timeline:
    if figures.cores is None:
        return simulate(stages.run, costs)
    home = _home(stages)
    every = {kind: [home * load for load in of] for kind, of in loads.items()}
    return simulate_sharing(
        stages.run, costs, cores=figures.cores, loads=every, crowding=figures.crowding
    )


def _work(timeline: Timeline, loads: _Loads) -> float:
    """What all actions compute on one device of each home, in seconds of a core."""
    durations = timeline.costs.per_stage(timeline.schedule.num_stages).durations()
    return sum(
        durations[each.kind][each.stage] * loads[each.kind][each.stage]
        for row in timeline.schedule.rows
        for each in row
    )


def _slowed(lone: Timeline, stages: Stages, figures: Figures, loads: _Loads) -> float:
    """How many times as long all work takes on the cores there are as on a device each."""
    if figures.cores is None:
        return 1.0
    busiest = sum(lone.busy) / len(lone.busy)
    wanted = _home(stages) * _work(lone, loads)
    return max(1.0, wanted / figures.cores / busiest) if busiest else 1.0


def _waiting(timeline: Timeline, stages: Stages, figures: Figures, loads: _Loads) -> float:
    """The share of the time in which devices, or cores if they have too few, do nothing."""
    if figures.cores is None:
        return timeline.bubble_ratio
    home, used = _home(stages), {each.kind for row in stages.run.rows for each in row}
    # A device keeps at most so many cores busy.
    most = max(load for kind in used for load in loads[kind])
    there = min(figures.cores, home * stages.table.num_devices * most) * timeline.makespan
    return max(0.0, 1 - home * _work(timeline, loads) / there) if there else 0.0


def _tails(stages: Stages, figures: Figures) -> tuple[list[float], float, float]:
    """What each place adds up after its last action, the update, and what both are to a device.

    Seconds; of the last, those that one device of each home computes, added up.
    """
    own = [0.0] * stages.table.num_devices
    for stage, place in enumerate(stages.table.stage_devices):
        own[place] += stages.weights(stage)
    sums = [summed(figures.transfer, figures, stages.replicas, size) for size in own]
    gradients = [seconds for seconds, _ in sums]
    # Each replica updates its share.
    each = [size / stages.replicas * figures.update for size in own]
    after = sum(work for _, work in sums) + sum(each)
    if figures.cores is None:
        return gradients, max(each), after
    # All weights of all devices at once, on as many cores as there are.
    largest = max(
        layer.parameter_bytes / stages.shared(layer) for of in stages.layers for layer in of
    )
    alone = largest / stages.replicas * figures.update
    return gradients, max(alone, sum(each) * _home(stages) / figures.cores), after
