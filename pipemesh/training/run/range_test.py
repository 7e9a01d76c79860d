"""The range test of learning rates: tries rates on a model before a run.

The learning rate grows by the same factor each step. The loss first stays, then falls, then rises.
See Leslie Smith, "Cyclical learning rates for training neural networks", section 3.3
(https://arxiv.org/abs/1506.01186). Exponential growth is from S. Gugger
(https://sgugger.github.io/how-do-you-find-a-good-learning-rate.html).
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys

import numpy as np

from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import NotFiniteError, RescaledError, TrainingError
from pipemesh.training.lingvo_params import HIGH, LOW, peak_rate
from pipemesh.training.run import Options
from pipemesh.training.run.console import Progress, Stops, waiting
from pipemesh.training.trainer import Trainer

# Losses are averaged over a third of a decade.
_MEANS_A_DECADE = 3
# The first steps, with negligible rates: a fifth of all, and at least ten.
_PART_FIRST, _FEWEST_FIRST = 5, 10
# The test ends when the loss exceeds the first losses by this share, or by this many standard
# deviations. The loss has fallen if it is this many below.
_RISE, _DEVIATIONS, _FALL = 0.25, 6.0, 2.0
# Differences below this share of the fall may be noise.
_NOISE = 0.1
# Most steps in a row that are not finite: more are no accident of the data.
_MOST_IN_A_ROW = 3
# Rows of the table for each decade.
_ROWS_A_DECADE = 2
_BAR = 40


class Curve:
    """Losses by ascending learning rate, each from the weights before its update."""

    def __init__(self, steps: int) -> None:
        decades = math.log10(HIGH / LOW)
        self._around = max(1, round(steps / decades / _MEANS_A_DECADE / 2))
        self._num_first = max(_FEWEST_FIRST, steps // _PART_FIRST)
        self.rates: list[float] = []
        self.losses: list[float] = []

    def add(self, rate: float, loss: float) -> None:
        """Adds a finite loss, and the rate of the update after it."""
        self.rates.append(rate)
        self.losses.append(loss)
        # Drop the cached means.
        self.__dict__.pop("means", None)

    @functools.cached_property
    def means(self) -> list[tuple[float, float]]:
        """Returns each rate with the mean of the losses after it and its neighbours."""
        after = np.array(self.losses[1:])
        around = self._around
        return [
            (rate, float(np.mean(after[max(0, i - around) : i + around + 1])))
            for i, rate in enumerate(self.rates[:-1])
        ]

    @property
    def begins_at(self) -> tuple[float, float]:
        """Returns mean and standard deviation of the first losses."""
        first = self.losses[: self._num_first]
        return float(np.mean(first)), float(np.std(first))

    @property
    def is_readable(self) -> bool:
        """Returns whether there are enough losses for a result."""
        return len(self.losses) >= self._num_first + 2 * self._around + 1

    @property
    def has_risen(self) -> bool:
        """Returns whether the loss is well above the first losses."""
        if not self.is_readable:
            return False
        mean, deviation = self.begins_at
        last = float(np.mean(self.losses[-2 * self._around - 1 :]))
        fall = mean - min(loss for _, loss in self.means)
        return last > mean + max(_RISE * abs(mean), _DEVIATIONS * deviation, fall)

    @property
    def has_fallen(self) -> bool:
        """Returns whether the loss fell below the first losses by more than noise."""
        if not self.is_readable:
            return False
        mean, deviation = self.begins_at
        lowest = min(loss for _, loss in self.means)
        return mean - lowest > max(_FALL * deviation, 1e-3 * abs(mean))

    @property
    def lowest(self) -> float:
        """Returns the rate with the lowest loss."""
        return min(self.means, key=lambda row: row[1])[0]

    @property
    def fastest(self) -> float:
        """Returns the rate at which the loss falls fastest, up to the lowest loss."""
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
        """Returns the largest rate to train with: the geometric mean of `fastest` and `lowest`."""
        # A run uses it for longer than a step, so it needs distance from where the loss rises.
        return math.sqrt(self.fastest * self.lowest)

    def table(self) -> str:
        """Returns the mean loss by rate, one per line, as numbers and as a bar."""
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
        """Returns all rates, with the loss of each step and the mean of the losses after it."""
        means = [f"{loss:.9g}" for _, loss in self.means]
        rows = zip(self.rates, self.losses, [*means, ""], strict=True)
        lines = ["learning_rate,loss,mean_loss_after"]
        lines += [f"{rate:.9g},{loss:.9g},{mean}" for rate, loss, mean in rows]
        return "\n".join(lines) + "\n"


class RangeTest:
    """A run with growing learning rates, which reports a good rate and saves no weights."""

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self._trainer, self._options = trainer, options
        self._stops = Stops()

    def run(self) -> int:
        """Trains, prints the result, and writes `learning_rates.csv`; returns the exit code."""
        first = self._trainer.step
        curve = Curve(self._options.find_learning_rate)
        with self._stops:
            end = self._try(curve)
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
        return self._stops.exit_code

    def _try(self, curve: Curve) -> str:
        """Trains until the loss has risen; returns the reason for the end as text."""
        steps, in_a_row = self._options.find_learning_rate, 0
        with Progress(0, steps) as progress:
            for number in range(steps):
                is_first = number == 0
                doing = waiting("building the graph") if is_first else contextlib.nullcontext()
                try:
                    with doing:
                        result = self._trainer.train_step()
                except RescaledError:
                    self._trainer.skip()
                    continue
                except NotFiniteError as error:
                    in_a_row += 1
                    if self._options.on_nonfinite == "stop" or in_a_row == _MOST_IN_A_ROW:
                        return self._not_finite(curve, error)
                    self._trainer.skip()
                    continue
                # As in the training loop: until the graph is built there is little garbage.
                gc.enable()
                in_a_row = 0
                curve.add(result["learning_rate"], result["loss"])
                text = f"rate {curve.rates[-1]:.1e}, loss {curve.losses[-1]:.3f}"
                progress.advance(text)
                if curve.has_risen:
                    return f"is well above that of the beginning at {curve.rates[-1]:.1e}"
                if self._stops.signal is not None:
                    return f"was looked at up to {curve.rates[-1]:.1e}, until the test was stopped"
        return f"is {curve.losses[-1]:.4g} at the highest, {curve.rates[-1]:.1e}"

    def _not_finite(self, curve: Curve, error: NotFiniteError) -> str:
        if not curve.rates:
            raise TrainingError(
                f"step {self._trainer.step + 1}: {error}, with a learning rate of next to nothing; "
                "the model or its data has to be mended first"
            ) from error
        # The rate of the step before, which produced the current weights.
        return f"is not finite beyond {curve.rates[-1]:.1e}"

    def _advice(self, curve: Curve, end: str) -> list[str]:
        """Returns the result and the advice as lines."""
        if not curve.has_fallen:
            return [
                f"the loss did not fall by more than it varies, and {end}; there is nothing to "
                "suggest"
            ]
        suggested, subject = curve.suggested, self._trainer.subject
        lines = [
            f"the loss falls the fastest at {curve.fastest:.1e}, is the lowest at "
            f"{curve.lowest:.1e}, and {end}",
            f"suggested: learning rates up to {suggested:.1e}",
        ]
        own = peak_rate(subject.task(), self._options.steps)
        if own is not None and own[2] > 0:
            name, factor, peak = own
            name = subject.rate_name or name
            lines.append(
                f"with {name}={factor:.3g} the model's own go up to {peak:.1e} within "
                f"{self._options.steps} steps; {name}={factor * suggested / peak:.2g} makes that "
                f"{suggested:.1e}"
            )
        return lines
