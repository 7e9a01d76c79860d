"""Failures and checkpoints of a run, and the share of its time that does lasting work."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random

from pipemesh.errors import PlanError


@dataclasses.dataclass(frozen=True)
class Failures:
    """Devices that fail at any time, independently of each other, and the cost of going on.

    A failure loses what was done since the last checkpoint, and the one that is being written. One
    during a restart begins it anew.

    Attributes:
        between: seconds from one failure to the next on average, of all devices together.
        save: seconds for which a checkpoint holds training up.
        restart: seconds from a failure until training goes on: until it is noticed, the graph is
            built again, and the checkpoint is read.

    Raises:
        PlanError: a number is negative or not finite, or there is no time between failures.

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
        """Seconds of work between checkpoints, by Young's formula of the first order.

        J. W. Young, "A first order approximation to the optimum checkpoint interval", 1974.
        """
        return math.sqrt(2 * self.save * self.between)

    @property
    def daly(self) -> float:
        """Seconds of work between checkpoints, by Daly's formula of higher order.

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
        """Seconds of work between checkpoints for which `goodput` is largest.

        The zero of its derivative, `exp(x + save / between) (1 - x) = 1` for the interval `x` in
        units of `between`: Young and Daly approximate it. 0 if checkpoints cost nothing.
        """
        if not self.save:
            return 0.0
        # By halves: the left side falls from above 1 to 0 between 0 and 1.
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

        Exact for failures that do not depend on each other (Daly 2006, equation 20): a piece of
        `interval` and its checkpoint takes `between exp(restart / between)
        (exp((interval + save) / between) - 1)` on average.

        Args:
            interval: seconds of work between checkpoints; 0 for ones that are written all the
                time, if they cost nothing.

        Raises:
            PlanError: the interval is negative, or 0 where checkpoints cost something.
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
        # Of pieces that are hopelessly long nothing is ever done.
        return again * interval / self.between / math.expm1(piece) if piece < 700 else 0.0


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of a simulated run with failures.

    Attributes:
        seconds: of the run.
        failures: their number.
        lost: seconds of work and checkpoints that failures destroyed.
        goodput: the share of the time that did lasting work.
    """

    seconds: float
    failures: int
    lost: float
    goodput: float


def simulate_failures(
    failures: Failures, interval: float, pieces: int, num_devices: int = 1, seed: int = 0
) -> Outcome:
    """Lets devices fail at random while a training goes on.

    Each of the devices has a clock of its own that says when it fails next, so nothing is taken
    from the closed form.

    Args:
        failures: how often, and what it costs.
        interval: seconds of work between checkpoints, above 0.
        pieces: how many of them are to be done, each with its checkpoint.
        num_devices: among which the failures are spread.
        seed: of the random times.

    Raises:
        PlanError: a number is out of range.

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
    # Who fails is replaced by one that begins now.
    fails = [draw(1 / mean) for _ in range(num_devices)]
    heapq.heapify(fails)
    now = lost = 0.0
    count, done = 0, 0

    def passes(begin: float, seconds: float) -> tuple[bool, float]:
        """Returns whether nothing fails in a span, and when it ends or a device fails."""
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
