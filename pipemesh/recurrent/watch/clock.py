"""Measures when the actions of a schedule run."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from pipemesh.backend.devices import processor_beside
from pipemesh.backend.operations import Call
from pipemesh.errors import ScheduleError
from pipemesh.schedule import Action, Costs, Schedule, Timeline
from pipemesh.schedule.action import KINDS
from pipemesh.schedule.costs import FIELD_OF


class ActionClock:
    """Records when each action of the latest step started and ended.

    An action starts when its inputs are available and its device is free. With replicas, it starts
    when the first of them starts and ends when the last one ends. Each record is a call into Python
    of some tens of microseconds, so do not measure total step time with a clock. On GPUs an action
    ends when its kernels are queued, not when they have run.

    Args:
        noted: called when an action starts (False) or ends (True).

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent import ActionClock, Options, Stage, pipeline
        >>> from pipemesh.schedule import forward_only
        >>> def double(theta, carry, inputs, microbatch, step):
        ...     return [2.0 * inputs[0]], []
        >>> clock, schedule = ActionClock(), forward_only(1, 4)
        >>> @tf.function
        ... def run(x):
        ...     stages = [Stage("double", double, [], [], "CPU:0")]
        ...     return pipeline(stages, [x], schedule, options=Options(clock=clock))[0]
        >>> _ = run(tf.ones([8]))
        >>> [str(span.action) for span in clock.timeline(schedule).spans()]
        ['0F0', '0F1', '0F2', '0F3']
    """

    def __init__(self, noted: Callable[[Action, bool], None] | None = None) -> None:
        self._noted = noted
        # For each replica; a stage with one replica has the number 0.
        self._times: dict[tuple[Action, bool], dict[int, float]] = {}
        self._lock = threading.Lock()

    def stamp(
        self,
        kind: str,
        stage: int,
        microbatch: tf.Tensor,  # int64 scalar
        is_end: bool,
        device: str,
        replica: int = 0,
    ) -> tf.Operation:
        """Returns an operation, on the CPU next to `device`, that records the time when it runs."""
        place = [KINDS.index(kind), stage, is_end, replica]

        def note(number: tf.Tensor) -> tf.Tensor:
            with tf.device(processor_beside(device)):
                return tf.numpy_function(self._note, [place, number], tf.int64)

        # In its own function, because TensorFlow runs stateful operations of one function one after
        # the other. Without state it would prune this one.
        function = tf.function(note, autograph=False)
        call = Call(function.get_concrete_function(tf.TensorSpec([], tf.int64)))
        return call([microbatch])[0].op

    def _note(self, place: np.ndarray, microbatch: np.ndarray) -> np.int64:
        now = time.perf_counter()
        kind, stage, is_end, replica = (int(number) for number in place)
        key = (Action(stage, KINDS[kind], int(microbatch)), bool(is_end))
        with self._lock:
            # If a replica waits for several tensors, the last one counts.
            self._times.setdefault(key, {})[replica] = now
            if self._noted is not None:
                self._noted(*key)
        return np.int64(0)

    def timeline(self, schedule: Schedule, unit: float = 1.0) -> Timeline:
        """Returns the timeline of the latest step.

        Args:
            schedule: the schedule of that step.
            unit: of the times, in seconds.

        Returns:
            The start and end of each action; its costs are medians over the microbatches. A `W` of
            a stage without weights takes no time, at the end of the action before it.

        Raises:
            ScheduleError: an action was not recorded, because no step has run with this clock, or a
                step with another schedule.
        """
        timed = {(action.kind, action.stage) for action, _ in self._times}
        rows: list[list[tuple[float, float]]] = []
        for row in schedule.rows:
            rows.append([])
            for action in row:
                noted, stage = schedule.as_piece(action), action.stage
                if {(noted, False), (noted, True)} <= self._times.keys():
                    rows[-1].append(self._mean_times(noted))
                elif action.kind == "W" and ("W", stage) not in timed and ("I", stage) in timed:
                    # The stage has no weights.
                    end = rows[-1][-1][1]
                    rows[-1].append((end, end))
                else:
                    raise ScheduleError(
                        f"action {action} was not timed; run a step of this schedule with "
                        "Options(clock=...) first"
                    )
        begin = min(start for row in rows for start, _ in row)
        starts, ends = (
            tuple(tuple((times[i] - begin) / unit for times in row) for row in rows)
            for i in range(2)
        )
        return Timeline(schedule, _median_costs(schedule, starts, ends), starts, ends)

    def durations(self) -> dict[Action, float]:
        """Returns the seconds of each recorded action; a stage without weights has no `W`.

        Actions of slices are named as in `Schedule.by_pieces`.
        """
        times = {
            action: self._mean_times(action)
            for action, is_end in self._times
            if is_end and (action, False) in self._times
        }
        return {action: end - start for action, (start, end) in times.items()}

    def span(self) -> tuple[float, float]:
        """Returns the first start and the last end of an action, in seconds of `time.perf_counter`.

        Raises:
            ScheduleError: no step has run with this clock.
        """
        times = [time for noted in self._times.values() for time in noted.values()]
        if not times:
            raise ScheduleError("no action was timed; run a step with Options(clock=...) first")
        return min(times), max(times)

    def _mean_times(self, action: Action) -> tuple[float, float]:
        """Returns the mean start and end of an action, over the devices that recorded both.

        The devices of a home drift apart, and the faster ones wait at the end. The first start and
        the last end would hide that waiting; means keep the mean share of waiting.
        """
        starts, ends = self._times[action, False], self._times[action, True]
        both = starts.keys() & ends.keys()
        start, end = (
            statistics.fmean(times[number] for number in both) for times in (starts, ends)
        )
        return start, end


def _median_costs(
    schedule: Schedule, starts: Sequence[Sequence[float]], ends: Sequence[Sequence[float]]
) -> Costs:
    """Returns the duration of each kind of action on each stage, as a median over microbatches."""
    taken: dict[tuple[str, int], list[float]] = {}
    for row, row_starts, row_ends in zip(schedule.rows, starts, ends, strict=True):
        for action, start, end in zip(row, row_starts, row_ends, strict=True):
            taken.setdefault((action.kind, action.stage), []).append(end - start)

    def of(kind: str) -> list[float]:
        # A stage without this kind of action has cost 0.
        return [statistics.median(taken.get((kind, s), [0.0])) for s in range(schedule.num_stages)]

    costs = {FIELD_OF[kind]: of(kind) for kind, _ in taken}
    return Costs(**{"forward": 0.0, **costs})
