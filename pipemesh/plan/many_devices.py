"""A run on more devices than there are: the best split, failures and checkpoints.

Example:
    >>> from pipemesh.partition import LayerCost
    >>> from pipemesh.plan import Link, Network, figures_of_costs
    >>> layers = figures_of_costs([LayerCost(1e-3, parameter_bytes=1e6)] * 16, rows=1)
    >>> network = Network(8, Link(1e-6, 1e11), Link(1e-5, 1e10))
    >>> job = Job(tuple(layers), network, batch=256)
    >>> found = forecast(job, 64, Reliability(device=1e8, storage=1e9))
    >>> found.step.split.num_devices, 0.9 < found.goodput < 1
    (64, True)
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.failures import Failures, Outcome, simulate_failures
from pipemesh.plan.figures import Figures, LayerFigures
from pipemesh.plan.network import Network
from pipemesh.plan.plan import built
from pipemesh.plan.predict import StepForecast, forecast_stages
from pipemesh.plan.remat import Remat
from pipemesh.plan.search import Split, rough_seconds
from pipemesh.plan.stages import cut_stages
from pipemesh.schedule.names import parse

__all__ = [
    "Failures",
    "Forecast",
    "Job",
    "Outcome",
    "Reliability",
    "Split",
    "Step",
    "best_step",
    "forecast",
    "forecast_step",
    "simulate_failures",
    "splits",
]


@dataclasses.dataclass(frozen=True)
class Job:
    """A training that may run on any number of devices.

    Attributes:
        layers: figures of the layers, first to last.
        network: what joins the devices.
        batch: rows of a batch, whatever the number of devices.
        memory: bytes of a device; None for no limit.
        action: seconds that an action takes beside its layers.
        optimizer: bytes of its state for each byte of weights.
        update: seconds that it takes for each byte of weights.
        fixed: seconds of a step that belong to no device: reading the batch, calling the graph.
        update_memory: bytes that an update needs at once for each byte of weights; see `Figures`.

    Raises:
        PlanError: there are no layers, or no rows, or a number is out of range.
    """

    layers: tuple[LayerFigures, ...]
    network: Network
    batch: int
    memory: float | None = None
    action: float = 0.0
    optimizer: float = 2.0
    update: float = 0.0
    fixed: float = 0.0
    update_memory: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers or self.batch < 1:
            raise PlanError(
                f"there are {len(self.layers)} layers and a batch of {self.batch} rows; there must "
                "be one of each at least"
            )
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"memory is {self.memory}; it must be a number of bytes above 0")
        # They are checked where they are used.
        _ = self.figures

    @functools.cached_property
    def figures(self) -> Figures:
        """Figures of the model on devices that have their own cores."""
        return Figures(
            self.layers,
            action=self.action,
            fixed=self.fixed,
            update=self.update,
            optimizer=self.optimizer,
            update_memory=self.update_memory,
        )

    @property
    def parameter_bytes(self) -> int:
        """Bytes of all weights, each counted once."""
        return sum(layer.parameter_bytes for layer in self.layers)


# Microbatches a place, and in any case, after which each takes as long as the one before.
_STEADY, _AT_LEAST = 4, 64


@dataclasses.dataclass(frozen=True)
class Step(StepForecast):
    """The forecast of a step, and how devices share it.

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
    `pipemesh.plan.network.over_hosts` lays them. A transfer keeps no device busy; sums of devices
    that share a layer keep all of them waiting. Gradients of replicas are added up, and weights
    handed out again, when a device has done its last action; each replica updates its share.

    Args:
        job: what is trained, on what.
        split: how devices share it; it fits the job, see `splits`.

    Raises:
        PipemeshError: the layers cannot be cut so, or the schedule cannot be had.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan.figures import figures_of_costs
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
    groups = (split.model,) * table.num_stages
    stages = cut_stages(figures, rows, split.data, groups, split.remat, table, network=job.network)
    fewer = None
    if number > most:
        half = built(split.schedule, split.layers, most // 2)
        fewer = dataclasses.replace(stages, table=half)
    found = forecast_stages(stages, figures, fewer=fewer, num_microbatches=number)
    return Step(**vars(found), split=split)


SCHEDULES = ("1f1b", "interleaved:2", "zb_h1", "zb_v")
# How many of the splits that look best are simulated.
_TRIED = 24


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The failure rate of devices, and the cost of saving and restarting.

    Attributes:
        device: mean seconds between two failures of a device.
        storage: bytes a second that a host writes to storage, and reads.
        notice: seconds until a failure is noticed and a device is replaced.
        start: seconds until the first step runs, graph construction included.

    Raises:
        PlanError: a number is out of range.
    """

    device: float
    storage: float
    notice: float = 30.0
    start: float = 60.0

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            must = "above 0" if name in ("device", "storage") else "from 0 on"
            if not (math.isfinite(number) and (number > 0 or (number == 0 and "from" in must))):
                raise PlanError(f"{name} is {number}; it must be a number {must}")

    def failures(self, job: Job, num_devices: int) -> Failures:
        """Returns the failures of a run on a number of devices.

        All hosts write their slices of weights and optimizer state while training waits.

        Args:
            job: the run.
            num_devices: its devices.

        Raises:
            PlanError: see `Failures`.
        """
        size = job.parameter_bytes * (1 + job.optimizer)
        hosts = math.ceil(num_devices / job.network.host_size)
        saved = size / hosts / self.storage
        return Failures(self.device / num_devices, saved, self.notice + self.start + saved)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The forecast of a run on a number of devices.

    Attributes:
        step: of the best split found.
        failures: of the devices; None if they never fail.
        interval: the best number of seconds between checkpoints; whole steps.
        goodput: the share of the time that does lasting work.
        tight: the ratio of the step to one with unlimited memory.
    """

    step: Step
    failures: Failures | None
    interval: float
    goodput: float
    tight: float

    @property
    def rows(self) -> float:
        """Rows a second for a batch of one row, failures included."""
        return self.goodput / self.step.seconds

    @property
    def binds(self) -> str:
        """The largest cost besides computing."""
        costs = {n: value for n, value in self.step.parts.items() if n != "compute"}
        costs["failures"] = self.step.seconds * (1 / self.goodput - 1) if self.goodput else 1e99
        costs["memory"] = self.step.seconds * (1 - 1 / self.tight)
        return max(costs, key=costs.__getitem__)


def splits(job: Job, num_devices: int, schedules: Sequence[str] = SCHEDULES) -> Iterator[Split]:
    """Yields all splits whose parts are powers of two of each other.

    Args:
        job: the run.
        num_devices: all of them are used.
        schedules: names of the schedules to try.
    """
    for model in _powers(job.network.host_size):
        if num_devices % model or model > max(layer.split for layer in job.layers):
            continue
        for layers in _powers(min(len(job.layers), num_devices // model)):
            data, rest = divmod(num_devices // model, layers)
            if rest or job.batch % data:
                continue
            for number in _powers(job.batch // data):
                if (job.batch // data) % number:
                    continue
                for schedule in schedules if layers > 1 else schedules[:1]:
                    if layers * parse(schedule).stages() > len(job.layers):
                        continue
                    for remat in (Remat.NONE, Remat.FULL):
                        yield Split(layers, data, model, schedule, number, remat)


def best_step(
    job: Job, num_devices: int, schedules: Sequence[str] = SCHEDULES
) -> tuple[Step, float]:
    """Returns the shortest step that fits into memory.

    A formula rates all splits, and the best two dozen are simulated.

    Args:
        job: the run.
        num_devices: all of them are used.
        schedules: names of the schedules to try.

    Returns:
        The step, and its ratio to the shortest one without a memory limit.

    Raises:
        PlanError: there is no split, or none fits.
    """
    rate = rough_seconds(job.figures, job.batch, job.network)
    rated = sorted(splits(job, num_devices, schedules), key=rate)
    if not rated:
        raise PlanError(
            f"{num_devices} devices cannot share {len(job.layers)} layers and a batch of "
            f"{job.batch} rows; use a number of devices and a batch that powers of two divide"
        )
    # What fits may be rated far behind what does not.
    endless = _simulated(job, rated, None)
    fitting = endless
    if job.memory is not None and endless[0].fullest > job.memory:
        fitting = _simulated(job, rated, job.memory)
    if not fitting:
        least = min((step.fullest for step in endless), default=0.0)
        raise PlanError(
            f"no way to share the model among {num_devices} devices of {job.memory:.3g} bytes "
            f"was found; of those that are fast the leanest needs {least:.3g}"
        )
    return fitting[0], fitting[0].seconds / endless[0].seconds


def _simulated(job: Job, rated: Sequence[Split], memory: float | None) -> list[Step]:
    """Returns the first two dozen steps that are valid and fit, shortest first."""
    found: list[Step] = []
    for split in rated:
        if memory is not None and _least_memory(job, split) > memory:
            continue
        try:
            step = forecast_step(job, split)
        except PipemeshError:
            # A table that is for other numbers of microbatches.
            continue
        if memory is None or step.fullest <= memory:
            found.append(step)
        if len(found) == _TRIED:
            break
    return sorted(found, key=lambda step: step.seconds)


def _least_memory(job: Job, split: Split) -> float:
    """Returns a lower bound of the bytes of the fullest device."""
    weights = job.parameter_bytes / split.layers / split.model
    return weights * (2 + job.optimizer / split.data)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def forecast(
    job: Job,
    num_devices: int,
    reliability: Reliability | None = None,
    schedules: Sequence[str] = SCHEDULES,
) -> Forecast:
    """Forecasts a run on a number of devices.

    Args:
        job: the run.
        num_devices: all of them are used.
        reliability: the failure rate; None for no failures.
        schedules: names of the schedules to try.

    Raises:
        PlanError: see `best_step`.
    """
    step, tight = best_step(job, num_devices, schedules)
    if reliability is None:
        return Forecast(step, None, 0.0, 1.0, tight)
    failures = reliability.failures(job, num_devices)
    # A checkpoint is written between two steps.
    steps = max(1, round(failures.best / step.seconds))
    interval = steps * step.seconds
    return Forecast(step, failures, interval, failures.goodput(interval), tight)
