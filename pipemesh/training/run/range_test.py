"""The range test of learning rates: which ones a model learns with, before it is trained.

From step to step the learning rate grows by the same factor, and the loss is watched: it stays
where it is, falls, and rises. Leslie Smith, "Cyclical learning rates for training neural networks",
section 3.3 (https://arxiv.org/abs/1506.01186); rates that grow by a factor are S. Gugger's
(https://sgugger.github.io/how-do-you-find-a-good-learning-rate.html).
"""

from __future__ import annotations

import functools
import gc
import math
import os
import signal
import sys
from typing import Any

import numpy as np

from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import NotFiniteError, RescaledError, TrainingError
from pipemesh.training.ramp import HIGH, LOW, peak_rate
from pipemesh.training.run.console import waiting
from pipemesh.training.run.options import Options
from pipemesh.training.run.progress import Progress
from pipemesh.training.trainer import Trainer

# Means are those over a third of a decade.
_MEANS_A_DECADE = 3
# Steps at the beginning, whose rates are next to nothing: a part of all, so many at least.
_PART_FIRST, _FEWEST_FIRST = 5, 10
# It ends where the loss is above that of the beginning by so much of it, or by so many standard
# deviations; it has fallen if it is below by so many.
_RISE, _DEVIATIONS, _FALL = 0.25, 6.0, 2.0
# What lies within this share of the fall may be noise.
_NOISE = 0.1
# Steps that are not finite, one after the other, are no accident of the data.
_MOST_IN_A_ROW = 3
# Rates of the table, a decade.
_ROWS_A_DECADE = 2
_BAR = 40
# A shell reports the number of the signal beyond this.
_BY_SIGNAL = 128


class Curve:
    """Losses by learning rate.

    Args:
        steps: how many rates there are to be.

    Attributes:
        rates: the learning rates, growing.
        losses: of the steps with them, each of the weights before that step.

    Example:
        >>> curve = Curve(100)
        >>> for number in range(100):
        ...     rate = 1e-7 * 10 ** (8 * number / 99)
        ...     curve.add(rate, 2 - rate / (rate + 0.01) + (rate / 0.5) ** 2)
        >>> f"{curve.fastest:.3f} {curve.lowest:.2f} {curve.suggested:.3f} {curve.has_risen}"
        '0.008 0.08 0.026 True'
    """

    def __init__(self, steps: int) -> None:
        decades = math.log10(HIGH / LOW)
        self._around = max(1, round(steps / decades / _MEANS_A_DECADE / 2))
        self._num_first = max(_FEWEST_FIRST, steps // _PART_FIRST)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def add(self, rate: float, loss: float) -> None:
        """Takes the loss of a step.

        Args:
            rate: the learning rate that the weights are updated with after it.
            loss: finite.
        """
        self.rates.append(rate)
        self.losses.append(loss)
        # It is asked for anew.
        self.__dict__.pop("means", None)

    @functools.cached_property
    def means(self) -> list[tuple[float, float]]:
        """Each rate with the mean of the losses behind it and its neighbours."""
        after = np.array(self.losses[1:])
        around = self._around
        return [
            (rate, float(np.mean(after[max(0, i - around) : i + around + 1])))
            for i, rate in enumerate(self.rates[:-1])
        ]

    @property
    def begins_at(self) -> tuple[float, float]:
        """Mean and standard deviation of the first losses."""
        first = self.losses[: self._num_first]
        return float(np.mean(first)), float(np.std(first))

    @property
    def is_readable(self) -> bool:
        """Whether there are enough losses to say anything."""
        return len(self.losses) >= self._num_first + 2 * self._around + 1

    @property
    def has_risen(self) -> bool:
        """Whether the loss is well above that of the beginning."""
        if not self.is_readable:
            return False
        mean, deviation = self.begins_at
        last = float(np.mean(self.losses[-2 * self._around - 1 :]))
        fall = mean - min(loss for _, loss in self.means)
        return last > mean + max(_RISE * abs(mean), _DEVIATIONS * deviation, fall)

    @property
    def has_fallen(self) -> bool:
        """Whether the loss was anywhere below that of the beginning by more than noise is."""
        if not self.is_readable:
            return False
        mean, deviation = self.begins_at
        lowest = min(loss for _, loss in self.means)
        return mean - lowest > max(_FALL * deviation, 1e-3 * abs(mean))

    @property
    def lowest(self) -> float:
        """The rate with the lowest loss."""
        return min(self.means, key=lambda row: row[1])[0]

    @property
    def fastest(self) -> float:
        """The rate, of those up to the lowest loss, at which the loss falls the fastest."""
        rates, losses = np.array(self.means).T
        end = int(np.argmin(losses))
        mean, _ = self.begins_at
        fallen = losses[: end + 1] <= mean - _NOISE * (mean - losses[end])
        if end < 1:
            return float(rates[end])
        slopes = np.gradient(losses[: end + 1], np.log(rates[: end + 1]))
        return float(rates[int(np.argmin(np.where(fallen, slopes, np.inf)))])

    @property
    def suggested(self) -> float:
        """The largest rate to train with: between the fastest fall and the lowest loss.

        In the middle by their logarithms. A training stays at its largest rate for longer than a
        step, so it has to keep away from where the loss rises.
        """
        return math.sqrt(self.fastest * self.lowest)

    def table(self) -> str:
        """The mean loss by rate, a line each, as numbers and as a bar."""
        rows: list[tuple[float, float]] = []
        for rate, loss in self.means:
            if not rows or math.log10(rate / rows[-1][0]) >= 0.999 / _ROWS_A_DECADE:
                rows.append((rate, loss))
        worst = max(loss for _, loss in rows)
        best = min(loss for _, loss in self.means)
        lines = ["    rate       loss"]
        for rate, loss in rows:
            share = (loss - best) / (worst - best) if worst > best else 0.0
            lines.append(f"{rate:8.1e} {loss:10.4g}  {'#' * round(_BAR * share)}".rstrip())
        return "\n".join(lines)

    def to_csv(self) -> str:
        """All rates, with the loss of each step, and the mean of those behind it."""
        means = [f"{loss:.9g}" for _, loss in self.means]
        rows = zip(self.rates, self.losses, [*means, ""], strict=True)
        lines = ["learning_rate,loss,mean_loss_after"]
        lines += [f"{rate:.9g},{loss:.9g},{mean}" for rate, loss, mean in rows]
        return "\n".join(lines) + "\n"


class RangeTest:
    """Trains with growing learning rates, and says what is to be learned from it; saves no weights.

    Args:
        trainer: made with these options, so that its learning rate grows.
        options: what is asked for, with `find_learning_rate`.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self._stop: int | None = None

    def run(self) -> int:
        """Trains, prints what was found, and writes `learning_rates.csv`; returns the exit code.

        A signal ends it early; what was found until then is printed.

        Raises:
            TrainingError: the loss is not finite from the beginning.
        """
        first = self._trainer.step
        curve = Curve(self._options.find_learning_rate)
        stops = (signal.SIGINT, signal.SIGTERM)
        old = {number: signal.signal(number, self._request_stop) for number in stops}
        try:
            end = self._try(curve)
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)
        number = len(curve.rates)
        print(f"{number} steps from step {first} on, each with a higher learning rate:")
        if number > 1:
            print(curve.table())
        for line in self._advice(curve, end):
            print(line)
        path = os.path.join(self._options.logdir, "learning_rates.csv")
        if number:
            write_whole(path, curve.to_csv().encode())
            print(f"all of them: {path}; no weights were saved")
        sys.stdout.flush()
        return 0 if self._stop is None else _BY_SIGNAL + self._stop

    def _request_stop(self, number: int, _frame: Any) -> None:
        if self._stop is not None:
            # The second time without ceremony.
            raise KeyboardInterrupt
        self._stop = number

    def _try(self, curve: Curve) -> str:
        """Trains until the loss has risen; returns what ended it, in words."""
        steps, in_a_row = self._options.find_learning_rate, 0
        with Progress(0, steps) as progress:
            for number in range(steps):
                try:
                    result = self._step(is_first=number == 0)
                except RescaledError:
                    self._trainer.skip()
                    continue
                except NotFiniteError as error:
                    in_a_row += 1
                    if self._options.on_nonfinite == "stop" or in_a_row == _MOST_IN_A_ROW:
                        return self._not_finite(curve, error)
                    self._trainer.skip()
                    continue
                in_a_row = 0
                curve.add(result["learning_rate"], result["loss"])
                told = f"rate {curve.rates[-1]:.1e}, loss {curve.losses[-1]:.3f}"
                progress.advance(told)
                if curve.has_risen:
                    return f"is well above that of the beginning at {curve.rates[-1]:.1e}"
                if self._stop is not None:
                    return f"was looked at up to {curve.rates[-1]:.1e}, until the test was stopped"
        return f"is {curve.losses[-1]:.4g} at the highest, {curve.rates[-1]:.1e}"

    def _not_finite(self, curve: Curve, error: NotFiniteError) -> str:
        if not curve.rates:
            raise TrainingError(
                f"step {self._trainer.step + 1}: {error}, with a learning rate of next to nothing; "
                "the model or its data has to be mended first"
            ) from error
        # Of the step before, whose rate moved the weights to where they are.
        return f"is not finite beyond {curve.rates[-1]:.1e}"

    def _step(self, is_first: bool) -> Any:
        if not is_first:
            return self._trainer.train_step()
        with waiting("building the graph"):
            result = self._trainer.train_step()
        # As the loop of training: until then little is garbage.
        gc.enable()
        return result

    def _advice(self, curve: Curve, end: str) -> list[str]:
        """What was found, and what to train with, in words."""
        if not curve.has_fallen:
            return [
                f"the loss did not fall by more than it varies, and {end}; there is nothing to "
                "suggest"
            ]
        wanted, subject = curve.suggested, self._trainer.subject
        lines = [
            f"the loss falls the fastest at {curve.fastest:.1e}, is the lowest at "
            f"{curve.lowest:.1e}, and {end}",
            f"suggested: learning rates up to {wanted:.1e}",
        ]
        found = peak_rate(subject.task(), self._options.steps)
        if found is not None and found[2] > 0:
            name, factor, peak = found
            name = subject.rate_name or name
            lines.append(
                f"with {name}={factor:.3g} the model's own go up to {peak:.1e} within "
                f"{self._options.steps} steps; {name}={factor * wanted / peak:.2g} makes that "
                f"{wanted:.1e}"
            )
        return lines
