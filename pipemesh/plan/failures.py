"""Failures and checkpoints of a run, and the share of its time that does lasting work."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random

from pipemesh.errors import PlanError


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
    """The result of a simulated run with failures.

    Attributes:
        seconds: duration of the run.
        failures: number of failures.
        lost: seconds of work and checkpoints that failures destroyed.
        goodput: share of the time that did lasting work.
    """

    seconds: float
    failures: int
    lost: float
    goodput: float


def simulate_failures(
    failures: Failures, interval: float, pieces: int, num_devices: int = 1, seed: int = 0
) -> Outcome:
    """Simulates a run on devices that fail at random.

    Each device draws its own next failure, so the simulation is independent of the closed form.
    `interval` is the seconds of work between checkpoints; each of the `pieces` ends with one.

    Example:
        >>> calm = Failures(between=1e9, save=1.0, restart=10.0)
        >>> simulate_failures(calm, interval=9.0, pieces=100).goodput
        0.9
    """
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
