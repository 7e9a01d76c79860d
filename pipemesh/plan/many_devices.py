"""Forecasts of a run on many devices: the best split, failures and checkpoints.

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
import heapq
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from pipemesh.errors import PipemeshError, PlanError
from pipemesh.plan.figures import Figures, LayerFigures, cuts_weights, splits_layers
from pipemesh.plan.network import Network
from pipemesh.plan.plan import built
from pipemesh.plan.predict import StepForecast, forecast_stages
from pipemesh.plan.remat import Remat
from pipemesh.plan.search import Split, least_bytes, rough_seconds
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
    """A run on any number of devices.

    Attributes:
        layers: figures of the layers, first to last.
        network: the links between the devices.
        batch: rows of a batch for any number of devices.
        memory: bytes of a device; None for no limit.
        action: overhead of an action in seconds, besides its layers.
        optimizer: bytes of optimizer state per byte of trained weights.
        update: seconds of the optimizer per byte of weights.
        fixed: seconds of a step that belong to no device: reading the batch, calling the graph.
        update_memory: peak bytes of an update per byte of weights; see `Figures`.
        rules: the layout rules of the layers' shares without a name; see `Figures`.

    Raises:
        PlanError: there are no layers or no rows, or a number is out of range.
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
    rules: str = ""

    def __post_init__(self) -> None:
        if not self.layers or self.batch < 1:
            raise PlanError(
                f"there are {len(self.layers)} layers and a batch of {self.batch} rows; there must "
                "be one of each at least"
            )
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"memory is {self.memory}; it must be a number of bytes above 0")
        # `Figures` checks the other numbers.
        _ = self.figures

    @functools.cached_property
    def figures(self) -> Figures:
        """Returns the figures of the model on devices that have their own cores."""
        return Figures(
            self.layers,
            action=self.action,
            fixed=self.fixed,
            update=self.update,
            optimizer=self.optimizer,
            update_memory=self.update_memory,
            rules=self.rules,
        )

    @property
    def parameter_bytes(self) -> int:
        """Returns the bytes of all weights, each counted once."""
        return sum(layer.parameter_bytes for layer in self.layers)

    @property
    def trained_bytes(self) -> float:
        """Returns the bytes of those that are trained."""
        return sum(layer.trained_bytes for layer in self.layers)


# Microbatches per home, and the minimum in all, after which each adds the same time.
_STEADY, _AT_LEAST = 4, 64


@dataclasses.dataclass(frozen=True)
class Step(StepForecast):
    """The forecast of a step, and how devices share it."""

    split: Split = dataclasses.field(kw_only=True)

    @property
    def fullest(self) -> float:
        """Returns the bytes of the fullest device."""
        return max(self.memory)


def forecast_step(job: Job, split: Split) -> Step:
    """Forecasts a step as `pipemesh.plan.predict` does, on a network of hosts."""
    # Slices of a layer are neighbours, then come replicas, then stages, as in
    # `pipemesh.plan.network.over_hosts`. A transfer keeps no device busy. All-reduces of devices
    # that share a layer keep all of them waiting.
    figures, number = job.figures, split.num_microbatches
    rows = job.batch / split.data / number
    # An even number of rounds, so that half of it is possible too.
    most = max(_STEADY, 2 * -(-_AT_LEAST // (2 * split.layers))) * split.layers
    table = built(split.schedule, split.layers, min(number, most))
    groups = (split.model,) * table.num_stages
    stages = cut_stages(
        *(figures, rows, split.data, groups, split.remat, table),
        network=job.network,
        rules=split.layout,
    )
    fewer = None
    if number > most:
        half = built(split.schedule, split.layers, most // 2)
        fewer = dataclasses.replace(stages, table=half)
    forecast_of_stages = forecast_stages(stages, figures, fewer=fewer, num_microbatches=number)
    return Step(**vars(forecast_of_stages), split=split)


SCALED_SCHEDULES = ("1f1b", "interleaved:2", "zb_h1", "zb_v")
# Number of top-rated splits that are simulated.
_TRIED = 24


@dataclasses.dataclass(frozen=True)
class Reliability:
    """The failure rate of devices, and the cost of saving and restarting.

    Attributes:
        device: mean seconds between two failures of a device.
        storage: bytes per second that a host writes to storage, and reads.
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

        Training waits while all hosts write their slices of weights and optimizer state.

        Raises:
            PlanError: see `Failures`.
        """
        size = job.parameter_bytes + job.trained_bytes * job.optimizer
        hosts = math.ceil(num_devices / job.network.host_size)
        saved = size / hosts / self.storage
        return Failures(self.device / num_devices, saved, self.notice + self.start + saved)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The forecast of a run on a number of devices.

    Attributes:
        step: the step of the best split found.
        failures: the failures of the devices; None if they never fail.
        interval: the best number of seconds between checkpoints, in whole steps.
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
        """Returns rows per second for a batch of one row, failures included."""
        return self.goodput / self.step.seconds

    @property
    def binds(self) -> str:
        """Returns the name of the largest cost besides computing."""
        costs = {n: value for n, value in self.step.parts.items() if n != "compute"}
        costs["failures"] = self.step.seconds * (1 / self.goodput - 1) if self.goodput else 1e99
        costs["memory"] = self.step.seconds * (1 - 1 / self.tight)
        return max(costs, key=costs.__getitem__)


def splits(
    job: Job, num_devices: int, schedules: Sequence[str] = SCALED_SCHEDULES
) -> Iterator[Split]:
    """Yields all splits with powers of two as numbers of homes, slices and microbatches."""
    # The number of replicas is the remaining factor of the devices.
    # Slices may lie on several hosts.
    slices = {
        layout: max(layer.shared(layout).most for layer in job.layers)
        for layout in job.figures.layouts
        # Weights that are cut over replicas save memory alone.
        if job.memory is not None or not cuts_weights(layout)
    }
    for layout, model in itertools.product(slices, _powers(num_devices)):
        if num_devices % model or model > slices[layout]:
            continue
        if model == 1 and layout and splits_layers(layout):
            continue
        for layers in _powers(min(len(job.layers), num_devices // model)):
            data, rest = divmod(num_devices // model, layers)
            if rest or job.batch % data or not job.figures.can_cut(data, layout):
                continue
            for number in _powers(job.batch // data):
                if (job.batch // data) % number:
                    continue
                for schedule in schedules if layers > 1 else schedules[:1]:
                    if layers * parse(schedule).stages() > len(job.layers):
                        continue
                    for remat in (Remat.NONE, Remat.FULL):
                        yield Split(layers, data, model, schedule, number, remat, layout)


def best_step(
    job: Job, num_devices: int, schedules: Sequence[str] = SCALED_SCHEDULES
) -> tuple[Step, float]:
    """Returns the shortest step that fits, and its ratio to the one of unlimited memory."""
    # A formula rates all splits, and the best two dozen are simulated.
    rate = rough_seconds(job.figures, job.batch, job.network)
    rated = sorted(splits(job, num_devices, schedules), key=rate)
    if not rated:
        raise PlanError(
            f"{num_devices} devices cannot share {len(job.layers)} layers and a batch of "
            f"{job.batch} rows; use a number of devices and a batch that powers of two divide"
        )
    # Splits that fit may be rated far below ones that do not.
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
    steps: list[Step] = []
    least = least_bytes(job.figures)
    for split in rated:
        if memory is not None and least(split) > memory:
            continue
        try:
            step = forecast_step(job, split)
        except PipemeshError:
            # The schedule is a table for other numbers of microbatches.
            continue
        if memory is None or step.fullest <= memory:
            steps.append(step)
        if len(steps) == _TRIED:
            break
    return sorted(steps, key=lambda step: step.seconds)


def _powers(most: int) -> list[int]:
    return [2**power for power in range(most.bit_length())]


def forecast(
    job: Job,
    num_devices: int,
    reliability: Reliability | None = None,
    schedules: Sequence[str] = SCALED_SCHEDULES,
) -> Forecast:
    """Forecasts a run on a number of devices.

    Args:
        job: the run.
        num_devices: number of devices; the run uses all of them.
        reliability: the failure rate; None for no failures.
        schedules: names of the schedules to try.

    Raises:
        PlanError: see `best_step`.
    """
    step, tight = best_step(job, num_devices, schedules)
    if reliability is None:
        return Forecast(step, None, 0.0, 1.0, tight)
    failures = reliability.failures(job, num_devices)
    # Checkpoints are written between two steps.
    steps = max(1, round(failures.best / step.seconds))
    interval = steps * step.seconds
    return Forecast(step, failures, interval, failures.goodput(interval), tight)


@dataclasses.dataclass(frozen=True)
class Failures:
    """Independent random failures of devices, and the cost of checkpoints and restarts.

    A failure loses the work since the last checkpoint, and an unfinished checkpoint. A failure
    during a restart begins the restart again.

    Attributes:
        between: mean seconds from one failure of any device to the next.
        save: seconds that a checkpoint stops training.
        restart: seconds from a failure until training resumes: noticing it, building the graph and
            reading the checkpoint.

    Raises:
        PlanError: a number is negative or not finite, or `between` is 0.

    Example:
        >>> failures = Failures(between=86_400.0, save=10.0, restart=120.0)
        >>> round(failures.young), round(failures.daly), round(failures.best)
        (1315, 1308, 1308)
        >>> round(failures.goodput(failures.best), 4)
        0.9835
    """

    between: float
    save: float
    restart: float

    def __post_init__(self) -> None:
        for name, number in vars(self).items():
            if not (math.isfinite(number) and number >= 0):
                raise PlanError(f"{name} is {number}; it must be a number of seconds from 0 on")
        if not self.between:
            raise PlanError("between is 0; there must be some time between failures")

    @property
    def young(self) -> float:
        """Returns seconds of work between checkpoints by Young's first-order formula.

        J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974.
        """
        return math.sqrt(2 * self.save * self.between)

    @property
    def daly(self) -> float:
        """Returns seconds of work between checkpoints by Daly's higher-order formula.

        J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
        2006, equation 37.
        """
        save, between = self.save, self.between
        if save >= 2 * between:
            return between
        share = save / (2 * between)
        return self.young * (1 + math.sqrt(share) / 3 + share / 9) - save

    @property
    def best(self) -> float:
        """Returns the seconds of work between checkpoints that maximize `goodput`.

        It is the zero of the derivative, `exp(x + save / between) (1 - x) = 1`, for the interval
        `x` in units of `between`. Young and Daly approximate it. It is 0 if checkpoints cost
        nothing.
        """
        if not self.save:
            return 0.0
        # Bisection: the left side falls from above 1 to 0 between 0 and 1.
        low, high, shift = 0.0, 1.0, self.save / self.between
        for _ in range(200):
            middle = (low + high) / 2
            # The logarithm does not overflow.
            if middle + shift + math.log1p(-middle) > 0:
                low = middle
            else:
                high = middle
            if high - low <= 1e-15 * high:
                break
        return (low + high) / 2 * self.between

    def goodput(self, interval: float) -> float:
        """Returns the share of the time that does lasting work.

        Exact for independent failures (Daly 2006, equation 20): a piece of `interval` and its
        checkpoint takes `between exp(restart / between) (exp((interval + save) / between) - 1)` on
        average. An interval of 0 is only valid if checkpoints cost nothing.
        """
        if not interval >= 0 or not (interval or not self.save):
            raise PlanError(
                f"the interval is {interval}; it must be above 0 seconds where checkpoints take "
                f"{self.save} seconds"
            )
        again = math.exp(-self.restart / self.between)
        if not interval:
            return again
        piece = (interval + self.save) / self.between
        # Pieces that are far too long never complete.
        return again * interval / self.between / math.expm1(piece) if piece < 700 else 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a simulated run with failures."""

    seconds: float  # duration of the run
    failures: int  # number of failures
    lost: float  # seconds of work and checkpoints that failures destroyed
    goodput: float  # share of the time that did lasting work


def simulate_failures(
    failures: Failures, interval: float, pieces: int, num_devices: int = 1, seed: int = 0
) -> Outcome:
    """Simulates a run whose devices fail at random, independently of the closed form."""
    # `interval` is the seconds of work between checkpoints; each of the `pieces` ends with one.
    if not interval > 0 or pieces < 1 or num_devices < 1:
        raise PlanError(
            f"interval is {interval}, pieces {pieces}, num_devices {num_devices}; the first must "
            "be above 0, the others from 1 on"
        )
    draw, mean = random.Random(seed).expovariate, failures.between * num_devices
    # A new device replaces the failed one and starts its time now.
    fails = [draw(1 / mean) for _ in range(num_devices)]
    heapq.heapify(fails)
    now = lost = 0.0
    count, done = 0, 0

    def passes(begin: float, seconds: float) -> tuple[bool, float]:
        """Returns whether a span passes without failure, and when it ends or a device fails."""
        nonlocal count
        failure = fails[0]
        if failure >= begin + seconds:
            return True, begin + seconds
        count += 1
        heapq.heapreplace(fails, failure + draw(1 / mean))
        return False, failure

    while done < pieces:
        whole, end = passes(now, interval + failures.save)
        if whole:
            done, now = done + 1, end
            continue
        lost, now = lost + end - now, end
        whole = False
        while not whole:
            whole, now = passes(now, failures.restart)
    return Outcome(now, count, lost, done * interval / now)
