"""Output of a run: text or objects, its record and its page."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from tqdm import tqdm

from pipemesh import __version__
from pipemesh.backend.peak import peak_memory
from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import PipemeshError
from pipemesh.layers import Report
from pipemesh.plan.plan import OF_PIPELINES
from pipemesh.report import Record, page, read
from pipemesh.report.record import PAGE
from pipemesh.schedule import Timeline
from pipemesh.training.run.console import say_object
from pipemesh.training.run.options import Options
from pipemesh.training.workers import Work

# Digits to a thousandth of the unit of time.
_DIGITS = 3


class Telling:
    """The output of a run, for people and for programs; the record goes to the log directory.

    Example:
        >>> import tempfile
        >>> told = Telling(Options(logdir=tempfile.mkdtemp(), steps=3))
        >>> told("final", "held out: loss 2.5", step=3, loss=2.5)
        held out: loss 2.5
        >>> os.listdir(told.folder)
        ['record.jsonl']
    """

    def __init__(self, options: Options, renew: Callable[[], object] = lambda: None) -> None:
        self.folder = options.logdir
        self._record = Record(self.folder, self.warn, renew)

    def __call__(
        self, kind: str, text: str | None = None, *, is_warning: bool = False, **values: Any
    ) -> None:
        """Reports an event.

        Kinds are in `pipemesh/report/README.md`. `text` is for people, or None; `is_warning` sends
        it to standard error. Further values are for programs.
        """
        if text is not None:
            self.warn(text) if is_warning else self.say(text)
        say_object(self._record.add(kind, **values))

    def say(self, text: str) -> None:
        """Writes a line for people, above the progress display."""
        tqdm.write(text, file=sys.stdout)
        sys.stdout.flush()

    def warn(self, text: str) -> None:
        """Writes a warning."""
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
        "peak_memory": peak_memory(trainer.trained.all_devices()),
        "versions": {
            "pipemesh": __version__,
            "tensorflow": tf.__version__,
            "python": platform.python_version(),
        },
    }


def of_report(found: Report) -> dict[str, Any]:
    """Returns the predicted values of a step."""
    return {
        "devices": [
            {
                "device": each.device,
                "weights": each.weights,
                "optimizer": found.optimizer.get(each.device, 0),
                "gradients": each.gradients,
                "activations": each.kept,
            }
            for each in found.memory
        ],
        "sent": [
            {"axes": each.axes, "what": each.what, "times": each.times, "bytes": each.bytes}
            for each in found.sent
        ],
        "bubble": found.bubble,
        "flops": found.flops,
        **_of_schedule(found.timeline),
    }


def of_measured(steps: Sequence[tuple[Timeline, float]]) -> dict[str, Any]:
    """Returns when the actions of some steps ran, from timelines in milliseconds; the first is
    shown.
    """

    def rounded(rows: Sequence[Sequence[float]]) -> list[list[float]]:
        return [[round(time, _DIGITS) for time in row] for row in rows]

    (measured, seconds), *others = steps
    return {
        **_of_schedule(measured),
        "seconds": seconds,
        "starts": rounded(measured.starts),
        "ends": rounded(measured.ends),
        "others": [[rounded(each.starts), rounded(each.ends)] for each, _ in others],
    }


def of_work(work: Sequence[Work]) -> list[dict[str, Any]]:
    """Returns the work of each worker as plain values."""
    return [
        {
            "worker": each.name,
            "seconds": round(each.seconds, 2 * _DIGITS),
            "times": None if each.times is None else round(each.times, _DIGITS),
            "is_slow": each.is_slow,
        }
        for each in work
    ]


def _of_schedule(timeline: Timeline) -> dict[str, Any]:
    costs = timeline.costs.per_stage(timeline.schedule.num_stages)
    return {"schedule": timeline.schedule.to_text(), "costs": costs.durations()}
