"""Output of a run: its record, page and trackers, and histograms and profiles."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import os
import platform
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from pipemesh import __version__
from pipemesh.backend.peak import peak_memory
from pipemesh.checkpoint.files import write_whole
from pipemesh.checkpoint.reader import reason
from pipemesh.errors import PipemeshError
from pipemesh.layers import Report
from pipemesh.plan.plan import OF_PIPELINES
from pipemesh.report import Record, page, read
from pipemesh.report.record import PAGE
from pipemesh.schedule import Timeline
from pipemesh.training.run import Options
from pipemesh.training.run.console import say_object
from pipemesh.training.run.trackers import Trackers

# Digits to a thousandth of the unit of time.
_DIGITS = 3


class Telling:
    """The output of a run, for people and for programs; the record goes to the log directory."""

    def __init__(self, options: Options, renew: Callable[[], object] = lambda: None) -> None:
        self.folder = options.logdir
        self._record = Record(self.folder, self.warn, renew)
        self._trackers = Trackers(options.trackers, self.folder, self.warn)

    def __call__(
        self,
        kind: str,
        text: str | None = None,
        *,
        is_warning: bool = False,
        histograms: Mapping[str, np.ndarray] = types.MappingProxyType({}),
        **values: Any,
    ) -> None:
        """Reports an event (see `pipemesh/report`): `text` for people, `values` for programs."""
        if text is not None:
            self.warn(text) if is_warning else self.say(text)
        say_object(self._record.add(kind, **values))
        self._trackers(kind, values, histograms)

    def say(self, text: str) -> None:
        """Writes a line for people, above the progress display."""
        from tqdm import tqdm

        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Writes a warning."""
        from tqdm import tqdm

        tqdm.write(text, file=sys.stderr)

    def write_page(self) -> str | None:
        """Writes the page of the run; returns its path, or None if that failed."""
        path = os.path.join(self.folder, PAGE)
        try:
            write_whole(path, page(read(self.folder)).encode("utf-8", "replace"))
        except (OSError, PipemeshError) as error:
            self.warn(f"the report cannot be written ({' '.join(str(error).split())})")
            return None
        return path


def of_beginning(trainer: Any, options: Options) -> dict[str, Any]:
    """Returns the values known before the first step of a run."""
    subject, unused = trainer.subject, () if trainer.trained.pipelines else OF_PIPELINES
    plan = subject.plan.to_values()
    return {
        "step": trainer.step,
        "restored": trainer.restored,
        "name": subject.name,
        "unit": subject.unit,
        "steps": options.steps,
        "logdir": options.logdir,
        "mesh": str(subject.plan.mesh),
        "plan": {name: text for name, text in plan.items() if name not in unused},
        "flags": options.given,
        "stages": trainer.stage_rows(),
        "sample": str(trainer.sample),
        "data": [dataclasses.asdict(each) for each in subject.data_counts()],
        "heldout": [dataclasses.asdict(each) for each in subject.data_counts(heldout=True)],
        "peak_memory": peak_memory(trainer.trained.all_devices()),
        "versions": {
            "pipemesh": __version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
    }


def of_report(forecast: Report) -> dict[str, Any]:
    """Returns the predicted values of a step."""
    return {
        "devices": [
            {
                "device": row.device,
                "weights": row.weights + row.variables,
                "optimizer": forecast.optimizer.get(row.device, 0),
                "gradients": row.gradients,
                "activations": row.kept,
            }
            for row in forecast.memory
        ],
        "sent": [
            {"axes": row.axes, "what": row.what, "times": row.times, "bytes": row.bytes}
            for row in forecast.sent
        ],
        "bubble": forecast.bubble,
        "flops": forecast.flops,
        **_of_schedule(forecast.timeline),
    }


def of_measured(steps: Sequence[tuple[Timeline, float]]) -> dict[str, Any]:
    """Returns when the actions of some steps ran, in milliseconds; the first is shown."""

    def rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[round(time, _DIGITS) for time in row] for row in rows]

    (measured, seconds), *others = steps
    return {
        **_of_schedule(measured),
        "seconds": seconds,
        "starts": rounded(measured.starts),
        "ends": rounded(measured.ends),
        "others": [[rounded(timeline.starts), rounded(timeline.ends)] for timeline, _ in others],
    }


def _of_schedule(timeline: Timeline) -> dict[str, Any]:
    costs = timeline.costs.per_stage(timeline.schedule.num_stages)
    return {"schedule": timeline.schedule.to_text(), "costs": costs.durations()}


class Histograms:
    """Weights before and after every `every`-th step; `every` 0 means never."""

    def __init__(self, weights: Mapping[str, Sequence[tf.Variable]], every: int) -> None:
        self._weights, self._every = weights, every
        self._before: dict[str, np.ndarray] = {}

    def before(self, step: int) -> None:
        """Copies the weights, if histograms of the coming step are due."""
        is_due = self._every and step % self._every == 0
        self._before = self._values() if is_due else {}

    def after(self, gradients: Mapping[str, Sequence[tf.Tensor]]) -> dict[str, np.ndarray]:
        """Returns weights, updates and gradients after a step, by tag; {} if none are due."""
        if not self._before:
            return {}
        before, self._before = self._before, {}
        histograms: dict[str, np.ndarray] = {}
        for name, value in self._values().items():
            histograms[f"weights/{name}"] = value
            histograms[f"updates/{name}"] = value - before[name]
        return histograms | {
            f"gradients/{name}": _joined(parts) for name, parts in gradients.items()
        }

    def _values(self) -> dict[str, np.ndarray]:
        return {name: _joined(parts) for name, parts in self._weights.items()}


def _joined(parts: Sequence[Any]) -> np.ndarray:
    return np.concatenate([part.numpy().ravel().astype(np.float32) for part in parts])


# The folder in which TensorBoard looks for profiles.
_FOLDER = os.path.join("plugins", "profile")


class Profile:
    """A profile of the steps from `steps[0]` to `steps[1]`; `warn` gets a line if it fails."""

    def __init__(
        self, folder: str, steps: tuple[int, int] | None, warn: Callable[[str], object]
    ) -> None:
        self._folder, self._steps, self._warn = os.path.abspath(folder), steps, warn
        self._runs = False
        self._before: set[str] = set()
        self.written: str | None = None

    @contextlib.contextmanager
    def around(self, step: int, end: int) -> Iterator[None]:
        """Encloses the steps of a call, up to `end`; the profile starts before the block and ends
        after it.
        """
        first, last = self._steps or (0, -1)
        if not first <= step <= last:
            yield
            return
        if not self._runs:
            self._begin()
        try:
            # Marks the start and end of a step for the profiler.
            with tf.profiler.experimental.Trace("train", step_num=step, _r=1):
                yield
        finally:
            if end == last:
                self.close()

    def _begin(self) -> None:
        self._before = self._files()
        try:
            tf.profiler.experimental.start(self._folder)
            self._runs = True
        except (OSError, tf.errors.OpError) as error:
            self._fail(reason(error))

    def close(self) -> None:
        """Writes an unfinished profile."""
        if not self._runs:
            return
        self._runs, self._steps = False, None
        try:
            tf.profiler.experimental.stop()
        except (OSError, tf.errors.OpError) as error:
            self._fail(reason(error))
            return
        # TensorFlow does not report that it could not write the profile.
        if new := self._files() - self._before:
            self.written = os.path.dirname(max(new))
        else:
            self._fail("nothing was written")

    def _fail(self, why: str) -> None:
        self._steps = None
        self._warn(f"there is no profile ({why}); training goes on")

    def _files(self) -> set[str]:
        pattern = os.path.join(glob.escape(os.path.join(self._folder, _FOLDER)), "*", "*.xplane.pb")
        return {path for path in glob.glob(pattern) if os.path.getsize(path)}
