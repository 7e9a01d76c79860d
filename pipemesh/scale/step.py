"""How long a step takes on many devices, and what of it is what."""

from __future__ import annotations

import dataclasses

from pipemesh.plan.plan import built
from pipemesh.plan.predict import StepForecast, forecast_stages
from pipemesh.plan.stage_costs import cut_stages
from pipemesh.scale.job import Job, Split

# Microbatches a place, and in any case, after which each takes as long as the one before.
_STEADY, _AT_LEAST = 4, 64


@dataclasses.dataclass(frozen=True)
class Step(StepForecast):
    """What is forecast of a step, and how devices share it.

    Attributes:
        split: how devices share it; see `pipemesh.plan.predict.StepForecast` for the rest.
    """

    split: Split = dataclasses.field(kw_only=True)

    @property
    def fullest(self) -> float:
        """Bytes of the fullest device."""
        return max(self.memory)


def forecast_step(job: Job, split: Split) -> Step:
    """Forecasts a step as `pipemesh.plan.predict` does, on a network of hosts.

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
    figures, number = job.figures, split.num_microbatches
    rows = job.batch / split.data / number
    # Of even numbers of rounds, so that half as many can be had, too.
    most = max(_STEADY, 2 * -(-_AT_LEAST // (2 * split.layers))) * split.layers
    table = built(split.schedule, split.layers, min(number, most))
    remat = "full" if split.again else "none"
    stages = cut_stages(figures, rows, split.data, split.model, remat, table, network=job.network)
    fewer = None
    if number > most:
        half = built(split.schedule, split.layers, most // 2)
        fewer = dataclasses.replace(stages, table=half)
    found = forecast_stages(stages, figures, fewer=fewer, num_microbatches=number)
    return Step(**vars(found), split=split)
