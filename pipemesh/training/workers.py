"""Workers of a run: their current actions, and the slow ones."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.backend.cluster import task_of
from pipemesh.hosts import watch
from pipemesh.recurrent import Marks

# A healthy worker answers within milliseconds.
_ANSWER = 1.0
# Flops predict a stage's time within some tens of percent; above this ratio the worker is slow.
_SLOW = 2.0


@dataclasses.dataclass(frozen=True)
class Work:
    """The recent work of a worker.

    Attributes:
        name: its number, address and stages.
        seconds: busy seconds of one of its devices, per step.
        times: its time for the same flops as a multiple of the other workers'; None if flops are
            unknown, or there is no other.
    """

    name: str
    seconds: float
    times: float | None

    @property
    def is_slow(self) -> bool:
        """Returns whether it takes so much longer that the model cannot be the reason."""
        return self.times is not None and self.times >= _SLOW


class Workers:
    """The current actions of workers, from marks in the pipelines that they run.

    Args:
        pipelines: the pipelines of a task, before their graphs are built. With one program for all
            devices there are no actions, and nothing is known.
        watched: the watch of the workers, which receives their actions.
    """

    def __init__(self, pipelines: Sequence[Any], watched: watch.Watch) -> None:
        self._watched = watched
        self._marks: list[Marks] = []
        for stack in pipelines:
            if not (stack.params.pipelined and stack.simd is None):
                continue
            homes = [home.devices for home in stack.StageHomes()]
            stack.clock = Marks(stack.schedule, homes, task_of)
            self._marks.append(stack.clock)
        # The last values read, and the number of steps then.
        self._before: dict[str, float] = {}
        self._steps = self._then = 0
        watched.progress = self

    def look(self) -> None:
        """Asks workers for their progress without waiting."""
        for marks in self._marks:
            marks.look()

    def waits(self) -> dict[int, list[str]]:
        """Returns the unfinished actions of each worker's devices, by its task."""
        found: dict[int, list[str]] = {}
        for marks in self._marks:
            for wait in marks.waits(_ANSWER):
                task = task_of(wait.stand.name)
                if task is not None:
                    found.setdefault(task, []).append(wait.told(self._name))
        return found

    def end_step(self) -> None:
        """Notes that a step was finished."""
        self._steps += 1
        for marks in self._marks:
            marks.end_step()
        if self._steps == 1:
            # The first step does more work than others.
            self.work(None)

    def end_failed_step(self) -> None:
        """Notes that a step was abandoned."""
        for marks in self._marks:
            marks.end_failed_step(_ANSWER)

    def work(self, costs: Mapping[str, Sequence[float]] | None) -> list[Work]:
        """Returns the work of each worker with a stage since the last call; nothing without a step.

        Call it between two steps. `costs` has, by kind of action, the flops cost on each stage;
        None if unknown.
        """
        steps = self._steps - self._then
        if not (self._marks and steps):
            return []
        now: dict[str, float] = {}
        for marks in self._marks:
            now.update(marks.seconds_at_work(_ANSWER))
        taken = {device: now[device] - self._before.get(device, 0.0) for device in now}
        self._before, self._then = now, self._steps
        by_task: dict[int, list[str]] = {}
        for device in taken:
            if (task := task_of(device)) is not None:
                by_task.setdefault(task, []).append(device)
        expected = self._expected(costs) if costs and len(self._marks) == 1 else {}
        rates = {
            task: sum(taken[d] for d in own) / flops
            for task, own in by_task.items()
            if (flops := sum(expected.get(d, 0.0) for d in own)) > 0
        }
        return [
            Work(
                self._watched.name(task),
                sum(taken[device] for device in own) / len(own) / steps,
                _times(task, rates),
            )
            for task, own in sorted(by_task.items())
        ]

    def _expected(self, costs: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Returns each device's share of all flops."""
        (marks,) = self._marks
        return marks.shares(costs)

    def _name(self, device: str) -> str:
        task = task_of(device)
        return device if task is None else f"{self._watched.name(task)} {device[-5:]}"


def _times(task: int, rates: Mapping[int, float]) -> float | None:
    others = [rate for other, rate in rates.items() if other != task]
    if task not in rates or not others or not (usual := statistics.median(others)) > 0:
        return None
    return rates[task] / usual


def followed(pipelines: Sequence[Any]) -> Workers | None:
    """Follows the workers that this process drives; None if it drives none.

    `pipelines` are those of a task, before their graphs are built.
    """
    watched = watch.current()
    return None if watched is None else Workers(pipelines, watched)
