"""The range test of learning rates: which ones a model learns with, before it is trained.

From step to step the learning rate grows by the same factor, and the loss is watched: it stays
where it is, falls, and rises. Leslie Smith, "Cyclical learning rates for training neural networks",
section 3.3 (https://arxiv.org/abs/1506.01186); rates that grow by a factor are S. Gugger's
(https://sgugger.github.io/how-do-you-find-a-good-learning-rate.html).
"""

from __future__ import annotations

import gc
import math
import os
import sys
from typing import Any

import numpy as np
from tqdm import tqdm

from pipemesh.checkpoint.whole_file import write_whole
from pipemesh.errors import NotFiniteError, TrainingError
from pipemesh.training.ramp import peak_rate
from pipemesh.training.run.console import SECONDS_A_REFRESH, waiting
from pipemesh.training.run.options import Options
from pipemesh.training.subject import Sample
from pipemesh.training.trainer import Trainer

# What is kept of the mean of losses from step to step.
_DECAY = 0.8
# It ends where the loss is above that of the beginning by so much of it.
_RISE = 0.25
# Rates of the table, a decade.
_ROWS_A_DECADE = 2
_BAR = 40


class Curve:
    """Losses by learning rate.

    Attributes:
        rates: the learning rates, growing.
        losses: of the steps with them.
        smooth: the mean of each loss and those before it, of which older ones count for less.

    Example:
        >>> curve = Curve()
        >>> for number in range(60):
        ...     rate = 1e-5 * 1.25**number
        ...     curve.add(rate, 2 - rate / (rate + 0.01) + (rate / 0.5) ** 2)
        >>> f"{curve.fastest:.2f} {curve.lowest:.2f} {curve.suggested:.2f} {curve.has_risen}"
        '0.02 0.18 0.06 True'
    """

    def __init__(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.smooth: list[float] = []
        self._mean = 0.0

    def add(self, rate: float, loss: float) -> None:
        """Takes the loss of a step.

        Args:
            rate: the learning rate that the weights are updated with after it.
            loss: finite.
        """
        self._mean = _DECAY * self._mean + (1 - _DECAY) * loss
        self.rates.append(rate)
        self.losses.append(loss)
        self.smooth.append(self._mean / (1 - _DECAY ** len(self.rates)))

    @property
    def has_risen(self) -> bool:
        """Whether the loss is well above that of the beginning."""
        if not self.smooth:
            return False
        first = self.smooth[0]
        return self.smooth[-1] > first + max(_RISE * abs(first), first - min(self.smooth))

    @property
    def lowest(self) -> float:
        """The rate with the lowest loss."""
        return self.rates[int(np.argmin(self.smooth))]

    @property
    def fastest(self) -> float:
        """The rate, of those up to the lowest loss, at which the loss falls the fastest."""
        end = int(np.argmin(self.smooth)) + 1
        if end < 2:
            return self.rates[0]
        slopes = np.gradient(self.smooth[:end], np.log(self.rates[:end]))
        return self.rates[int(np.argmin(slopes))]

    @property
    def suggested(self) -> float:
        """The largest rate to train with: between the fastest fall and the lowest loss.

        In the middle by their logarithms. A training stays at its largest rate for longer than a
        step, so it has to keep away from where the loss rises.
        """
        return math.sqrt(self.fastest * self.lowest)

    def table(self) -> str:
        """The mean loss by rate, a line each, as numbers and as a bar."""
        apart = math.log(10) / _ROWS_A_DECADE
        rows: list[tuple[float, float]] = []
        for rate, loss in zip(self.rates, self.smooth, strict=True):
            if not rows or math.log(rate / rows[-1][0]) >= apart * 0.999:
                rows.append((rate, loss))
        worst = max(loss for _, loss in rows)
        best = min(self.smooth)
        lines = ["    rate       loss"]
        for rate, loss in rows:
            share = (loss - best) / (worst - best) if worst > best else 0.0
            lines.append(f"{rate:8.1e} {loss:10.4g}  {'#' * round(_BAR * share)}".rstrip())
        return "\n".join(lines)

    def to_csv(self) -> str:
        """All rates, with the loss and the mean loss of each."""
        rows = zip(self.rates, self.losses, self.smooth, strict=True)
        lines = ["learning_rate,loss,mean_loss", *(f"{r:.9g},{a:.9g},{b:.9g}" for r, a, b in rows)]
        return "\n".join(lines) + "\n"


class RangeTest:
    """Trains with growing learning rates, and says what is to be learned from it; saves no weights.

    Args:
        trainer: made with these options, so that its learning rate grows.
        options: what is asked for, with `find_learning_rate`.
    """

    def __init__(self, trainer: Trainer, options: Options) -> None:
        self._trainer, self._options = trainer, options
        # Nothing is judged by it.
        trainer.sample = Sample((), "none")

    def run(self) -> int:
        """Trains, prints what was found, and writes `learning_rates.csv`; returns the exit code.

        Raises:
            TrainingError: the lowest learning rate already is too high.
        """
        first = self._trainer.step
        curve = Curve()
        end = self._try(curve)
        path = os.path.join(self._options.logdir, "learning_rates.csv")
        write_whole(path, curve.to_csv().encode())
        print(f"{len(curve.rates)} steps from step {first} on, each with a higher learning rate:")
        print(curve.table())
        print(
            f"the loss falls the fastest at {curve.fastest:.1e}, is the lowest at "
            f"{curve.lowest:.1e}, and {end}"
        )
        for line in self._advice(curve):
            print(line)
        print(f"all of them: {path}; no weights were saved", flush=True)
        return 0

    def _try(self, curve: Curve) -> str:
        """Trains until the loss has risen; returns what ended it, in words."""
        trainer, steps = self._trainer, self._options.find_learning_rate
        terminal = sys.stderr.isatty()
        with tqdm(
            total=steps,
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            mininterval=SECONDS_A_REFRESH[terminal],
            file=sys.stderr,
        ) as bar:
            for number in range(steps):
                try:
                    result = self._first_step() if not number else trainer.train_step()
                except NotFiniteError as error:
                    if not curve.rates:
                        raise TrainingError(
                            f"step {trainer.step + 1}: {error}, with a learning rate of next to "
                            "nothing; the model or its data has to be mended first"
                        ) from error
                    # Of the step before, whose rate moved the weights to where they are.
                    return f"is not finite beyond {curve.rates[-1]:.1e}"
                curve.add(result["learning_rate"], result["loss"])
                bar.set_postfix_str(
                    f"rate {curve.rates[-1]:.1e}, loss {curve.losses[-1]:.3f}", refresh=False
                )
                bar.update()
                if curve.has_risen:
                    return f"is above that of the beginning at {curve.rates[-1]:.1e}"
        return f"is {curve.smooth[-1]:.4g} at the highest, {curve.rates[-1]:.1e}"

    def _first_step(self) -> Any:
        with waiting("building the graph"):
            result = self._trainer.train_step()
        # As the loop of training: until then little is garbage.
        gc.enable()
        return result

    def _advice(self, curve: Curve) -> list[str]:
        """What to train with, in words."""
        wanted, subject = curve.suggested, self._trainer.subject
        found = peak_rate(subject.task(), self._options.steps)
        if found is None or not found[1] > 0:
            return [f"suggested: learning rates up to {wanted:.1e}"]
        factor, peak = found
        return [
            f"suggested: learning rates up to {wanted:.1e}. With {subject.rate_name}="
            f"{factor:.3g} the model's own go up to {peak:.1e} within {self._options.steps} steps; "
            f"{subject.rate_name}={factor * wanted / peak:.2g} makes that {wanted:.1e}"
        ]
