"""The record of a run: one line of JSON per event. Training goes on if it cannot be written."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import math
import numbers
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PipemeshError, ReportError
from pipemesh.schedule import Costs, Schedule, Timeline, simulate, validate
from pipemesh.schedule.costs import FIELD_OF

FILE = "record.jsonl"
"""The name of the record in a log directory."""

# After the record could not be written.
_STEPS_BETWEEN_TRIES = 100


def to_line(kind: str, values: Mapping[str, Any]) -> str:
    """Returns an event as a line of JSON, which has null for numbers that are not finite."""
    return json.dumps(_plain({"event": kind, **values}), ensure_ascii=False)


class Record:
    """Appends to the record of a log directory.

    A process that resumes from a checkpoint adds a `begin` with its step: `read` then discards
    the earlier lines of later steps.

    Args:
        folder: the log directory.
        warn: called with a line, once, when the record cannot be written, and when it was removed.
        renew: called before a new file replaces one that was removed; it raises an OSError to
            prevent that.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = Record(folder).add("begin", step=0, time=0)
        >>> with open(os.path.join(folder, FILE)) as file:
        ...     file.read()
        '{"event": "begin", "step": 0, "time": 0}\\n'
    """

    def __init__(
        self,
        folder: str,
        warn: Callable[[str], object] = print,
        renew: Callable[[], object] = lambda: None,
    ) -> None:
        self._path, self._warn, self._renew = os.path.join(folder, FILE), warn, renew
        self._fd: int | None = None
        # The first line of a new file.
        self._begin, self._is_removed = "", False
        self._step, self._again, self._failed = 0, 0, False

    def add(self, kind: str, **values: Any) -> str:
        """Appends a line.

        Args:
            kind: the kind of event.
            **values: by name. The time is added, in seconds since 1970; the default of `step` is
                that of the line before.

        Returns:
            The line.
        """
        self._step = values.setdefault("step", self._step)
        values.setdefault("time", round(time.time(), 3))
        line = to_line(kind, values)
        if kind == "begin":
            self._begin = line
        if self._step >= self._again:
            self._append(line)
        return line

    def _append(self, line: str) -> None:
        try:
            if self._fd is not None and not os.fstat(self._fd).st_nlink:
                os.close(self._fd)
                self._fd, self._is_removed = None, True
            if self._is_removed:
                self._renew()
                # Another process may have made a file in its place.
                self._fd = _open(self._path, os.O_EXCL)
                self._is_removed, line = False, f"{self._begin}\n{line}"
                self._warn(f"{self._path} was removed; later events go into a new one")
            elif self._fd is None:
                self._fd = _open(self._path)
            content = f"{line}\n".encode("utf-8", "backslashreplace")
            if os.write(self._fd, content) < len(content):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            if self._fd is not None:
                # Opening the file again ends a line that was written in part.
                with contextlib.suppress(OSError):
                    os.close(self._fd)
                self._fd = None
            self._again = self._step + _STEPS_BETWEEN_TRIES
            if not self._failed:
                self._failed = True
                self._warn(
                    f"{self._path} cannot be written ({error.strerror or error}); training goes on"
                )


def _open(path: str, more_flags: int = 0) -> int:
    """Opens a file to append to, and ends its last line if that was cut short."""
    # O_NONBLOCK: opening a pipe without a reader would wait.
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK | more_flags
    fd = os.open(path, flags, 0o666)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            os.write(fd, b"\n")
    except OSError:
        os.close(fd)
        raise
    return fd


def _plain(value: Any) -> Any:
    """Returns a value in the types that JSON has."""
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {str(name): _plain(content) for name, content in items}
    if isinstance(value, (list, tuple)):
        return [_plain(element) for element in cast("list[Any]", value)]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else None
    # A number of NumPy, or anything else as text.
    return _plain(value.item()) if hasattr(value, "item") else str(value)


Points = list[tuple[int, float | None]]
"""A value by step, in ascending order; None if it was not finite."""

PAGE = "report.html"
"""The page of a run, in its log directory."""
SAMPLES = "samples.jsonl"
"""The name of a file in a log directory, with the output of `pipemesh decode --format=json`."""

# Kinds of lines of which the last one of each step counts.
_OF_A_STEP = ("step", "heldout", "final", "skipped", "spike", "checkpoint", "unsaved")
# Fields that are no values of curves; `judged` repeats one of the values.
_NO_VALUES = {"event", "step", "time", "judged"}


@dataclasses.dataclass(frozen=True)
class Run:
    """A recorded run.

    Attributes:
        folder: its log directory.
        train: for each value its curve over the training steps.
        heldout: for each value its curve in evaluations during training.
        final: for each value its curve in evaluations at the end of training.
        told: lines by kind and step: `skipped`, `spike`, `checkpoint`, `unsaved`.
        begins: the first lines of its processes.
        last: by kind, the last line of `begin`, `forecast`, `measured`, `workers`, `schedule`
            and `end`.
        samples: prompts with the decoded texts.
        unread: how many lines could not be read.
    """

    folder: str
    train: Mapping[str, Points]
    heldout: Mapping[str, Points]
    final: Mapping[str, Points]
    told: Mapping[str, Mapping[int, Mapping[str, Any]]]
    begins: Sequence[Mapping[str, Any]]
    last: Mapping[str, Mapping[str, Any]]
    samples: Sequence[tuple[str, str]] = ()
    unread: int = 0

    @property
    def name(self) -> str:
        """The name of the model."""
        return str(self.fact("begin", "name", "unnamed"))

    @property
    def unit(self) -> str:
        """The unit of its speed, such as `tokens`."""
        return str(self.fact("begin", "unit", "examples"))

    @property
    def step(self) -> int:
        """The last recorded step."""
        steps = [int(self.last["begin"].get("step", 0))] if self.begins else [0]
        steps += [points[-1][0] for points in self.train.values() if points]
        return max([*steps, *self.told["skipped"]])

    @property
    def resumed(self) -> list[int]:
        """The steps that later processes resumed from."""
        return sorted({begin["step"] for begin in self.begins if begin["step"]})

    @property
    def state(self) -> str:
        """Its end, in words."""
        if not self.begins:
            return "no start is recorded"
        end = self.last.get("end")
        if end is None:
            return f"no end is recorded: running, or killed, at step {self.step:,} or later"
        return f"{end.get('reason', 'ended')}, at step {self.step:,}"

    def fact(self, kind: str, name: str, other: Any = None) -> Any:
        """Returns a value of the last line of a kind, or `other` if there is none."""
        value = self.last.get(kind, {}).get(name)
        return other if value is None else value

    def table(self, kind: str, name: str) -> list[Any]:
        """Returns a list of the last line of a kind; empty if there is none."""
        return list(self.fact(kind, name, []))

    def pairs(self, kind: str, name: str) -> dict[str, str]:
        """Returns texts by name of the last line of a kind; empty if there are none."""
        content: Any = self.fact(kind, name)
        if not isinstance(content, dict):
            return {}
        pairs = cast("dict[str, Any]", content).items()
        # True and false as flags have them.
        return {key: str(v).lower() if isinstance(v, bool) else str(v) for key, v in pairs}

    def median(self, name: str) -> float | None:
        """Returns the median of a value of training; None if it has none."""
        values = [value for _, value in self.train.get(name, []) if value is not None]
        return statistics.median(values) if values else None

    def measured(self) -> Timeline | None:
        """Returns the timed step in milliseconds; None if no step was timed."""
        line = self.last.get("schedule")
        if line is None:
            return None
        schedule, costs = _schedule(line)
        return Timeline(schedule, costs, _rows(line["starts"]), _rows(line["ends"]))

    def timed(self) -> list[Timeline]:
        """Returns all timed steps in milliseconds, `measured` first."""
        first = self.measured()
        if first is None:
            return []
        others = [
            dataclasses.replace(first, starts=_rows(starts), ends=_rows(ends))
            for starts, ends in self.table("schedule", "others")
        ]
        return [first, *others]

    def predicted(self) -> Timeline | None:
        """Returns the step that flops predict, in forward passes of a mean stage."""
        line = self.last.get("forecast")
        if line is None or "schedule" not in line:
            return None
        schedule, costs = _schedule(line)
        forward = costs.per_stage(schedule.num_stages).durations()["F"]
        unit = sum(forward) / len(forward) or 1.0
        scaled = {
            name: [cost / unit for cost in line["costs"][kind]] for kind, name in _COSTS.items()
        }
        return simulate(schedule, Costs(**scaled))


MEMORY = ("weights", "optimizer", "gradients", "activations")
"""The memory of a device, by its names in a forecast."""
EXPECTED = (
    *("compute", "actions", "bubble", "imbalance", "sums", "transfers"),
    *("gradients", "optimizer", "fixed"),
)
"""The parts of a predicted step, as in `pipemesh.plan.Prediction.parts`."""
_COSTS = {kind: FIELD_OF[kind] for kind in "FBIW"}


def read(folder: str) -> Run:
    """Reads the record of a log directory.

    Args:
        folder: the log directory.

    Returns:
        The run. If a process resumed from a checkpoint, earlier lines of later steps do not count.

    Raises:
        ReportError: there is no record, or it cannot be read.

    Example:
        >>> import tempfile
        >>> folder = tempfile.mkdtemp()
        >>> _ = Record(folder).add("step", step=1, loss=2.0)
        >>> read(folder).train
        {'loss': [(1, 2.0)]}
    """
    path = os.path.join(folder, FILE)
    if not os.path.isdir(folder):
        kind = "is a file" if os.path.exists(folder) else "does not exist"
        raise ReportError(f"{folder!r} {kind}; give the log directory of a run")
    if not os.path.exists(path):
        raise ReportError(
            f"{folder!r} has no {FILE}; give the log directory of a run, which writes one"
        )
    steps: dict[str, dict[int, dict[str, Any]]] = {kind: {} for kind in _OF_A_STEP}
    begins: list[dict[str, Any]] = []
    last: dict[str, dict[str, Any]] = {}
    unread = 0
    # A last line without an end is still being written.
    for line in _lines(path)[:-1]:
        event = _event(line)
        if event is None:
            unread += 1
            continue
        kind, step = event["event"], event["step"]
        if kind in steps:
            steps[kind][step] = event
            continue
        last[kind] = event
        if kind == "begin":
            last.pop("end", None)
            begins.append(event)
            for lines_by_step in steps.values():
                for beyond in [later for later in lines_by_step if later > step]:
                    del lines_by_step[beyond]
    if not (begins or any(steps.values())):
        raise ReportError(f"{path!r} has no steps yet; wait for the first one")
    curves = {kind: _curves(steps.pop(kind)) for kind in ("step", "heldout", "final")}
    samples, lost = _samples(os.path.join(folder, SAMPLES))
    return Run(
        folder,
        curves["step"],
        curves["heldout"],
        curves["final"],
        steps,
        begins,
        last,
        samples,
        unread + lost,
    )


def _lines(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().split("\n")
    except OSError as error:
        raise ReportError(f"{path!r} cannot be read ({error.strerror})") from error


def _event(line: str) -> dict[str, Any] | None:
    """Returns the event of a line; None if it was cut short, or is something else."""
    try:
        event: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):  # pyright: ignore
        return None
    step: Any = event.get("step")  # pyright: ignore
    if isinstance(step, bool) or not isinstance(step, int) or step < 0:
        return None
    checked: dict[str, Any] = event  # pyright: ignore
    return checked if _is_sound(checked) else None


def _is_sound(event: Mapping[str, Any]) -> bool:
    """Checks that a line has the fields that pages show, in the right types."""
    kind = event["event"]
    try:
        if kind == "begin":
            for rows in event.get("stages", ()):
                if not rows or {len(row) for row in rows} != {len(rows[0])}:
                    return False
                "".join(cell for row in rows for cell in row)
        if kind in ("begin", "measured"):
            float(event.get("peak_memory") or 0)
        if kind == "forecast":
            for each in event.get("devices", ()):
                sum((each[part] for part in MEMORY), 0.0)
                str(each["device"])
            _ = int(event.get("rows") or 0), [cut + 0 for cut in event.get("cuts") or ()]
            _ = (event.get("cores") or 0) + 0.0, (event.get("device_memory") or 0) + 0.0
            for layer in event.get("layers") or ():
                _ = layer["flops"] + 0.0, layer["output_bytes"] + 0.0
                _ = (layer["parameter_bytes"] or 0) + 0.0, (layer["activation_bytes"] or 0) + 0.0
            if (predicted := event.get("predicted")) is not None:
                _ = predicted["seconds"] + 0.0, max(each + 0.0 for each in predicted["memory"])
                _ = [predicted["parts"][name] + 0.0 for name in EXPECTED]
            for each in event.get("sent", ()):
                _ = each["axes"], each["what"], f"{each['times']:,}", each["bytes"] + 0.0
        if kind == "workers":
            for each in event["workers"]:
                _ = each["worker"], each["seconds"] + 0.0, (each["times"] or 0.0) + 0.0
                _ = each["is_slow"]
        if kind == "schedule" or (kind == "forecast" and "schedule" in event):
            schedule, costs = _schedule(event)
            simulate(schedule, costs)
            if kind == "schedule":
                _ = (event.get("seconds") or 0) + 0.0
                steps = ((event["starts"], event["ends"]), *event.get("others", ()))
                return all(_are_times(schedule.rows, *step) for step in steps)
    except (PipemeshError, AttributeError, KeyError, TypeError, ValueError):
        return False
    return True


def _are_times(rows: Sequence[Sequence[Any]], starts: Any, ends: Any) -> bool:
    """Checks that each action of a schedule has times, and ends after its start."""
    return all(
        start + 0.0 <= end + 0.0
        for of_row in zip(rows, starts, ends, strict=True)
        for _, start, end in zip(*of_row, strict=True)
    )


def _rows(times: Any) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in times)


def _schedule(line: Mapping[str, Any]) -> tuple[Schedule, Costs]:
    schedule = validate(Schedule.from_text(line["schedule"]))
    return schedule, Costs(**{name: line["costs"][kind] for kind, name in _COSTS.items()})


def _curves(events: Mapping[int, Mapping[str, Any]]) -> dict[str, Points]:
    curves: dict[str, Points] = {}
    for step in sorted(events):
        nothing = {name: None for name, value in events[step].items() if value is None}
        for name, value in {**nothing, **curve_values(events[step])}.items():
            curves.setdefault(name, []).append((step, value))
    return curves


def curve_values(event: Mapping[str, Any]) -> dict[str, float]:
    """Returns the values of an event that belong to curves, by name."""
    return {
        name: cast("float", value)
        for name, value in event.items()
        if name not in _NO_VALUES
        and isinstance(value, numbers.Real)
        and not isinstance(event[name], bool)
    }


def _samples(path: str) -> tuple[list[tuple[str, str]], int]:
    """Returns prompts with their texts, and how many lines could not be read."""
    if not os.path.exists(path):
        return [], 0
    samples: list[tuple[str, str]] = []
    lost = 0
    for line in filter(None, _lines(path)):
        try:
            sample: Any = json.loads(line)
            prompt, text = sample["prompt"], sample["text"]
        except (ValueError, KeyError, TypeError):
            lost += 1
            continue
        samples.append((str(prompt), str(text)))
    return samples, lost
