"""The progress of each device in the current step, and which action it waits for."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.devices import processor_beside
from pipemesh.backend.operations import Call
from pipemesh.schedule import Action, Schedule
from pipemesh.schedule.action import needs


@dataclasses.dataclass(frozen=True)
class Stand:
    """The progress of a device in a step."""

    name: str
    actions: tuple[Action, ...]  # those that it takes part in
    started: int
    ended: int
    is_silent: bool = False  # it did not answer, so it may have come further


@dataclasses.dataclass(frozen=True)
class Wait:
    """The current action of an unfinished device."""

    stand: Stand
    action: Action  # the current or the next one
    has_begun: bool
    # unfinished actions that it needs, with their devices
    missing: tuple[tuple[Action, tuple[str, ...]], ...]

    def __str__(self) -> str:
        return self.told()

    def told(self, name: Callable[[str], str] = str) -> str:
        """Returns the wait as a line; `name` maps a device to the name to print."""
        at = f"{name(self.stand.name)}: "
        if self.stand.is_silent:
            return f"{at}does not answer, in {self.action} or later"
        actions = " and ".join(
            f"{action} of {', '.join(map(name, who))}" for action, who in self.missing
        )
        if self.has_begun:
            # Recomputation runs before the gradient arrives.
            return f"{at}in {self.action}" + (f", waits for {actions}" if actions else "")
        return f"{at}waits to begin {self.action}, for {actions or 'what it needs to arrive'}"


def waits_of(schedule: Schedule, stands: Sequence[Stand]) -> list[Wait]:
    """Returns the current action of each unfinished device.

    Inputs of a finished action must exist. So for a device that does not answer, actions whose
    results others have used count as finished.
    """
    split = {(a.stage, a.microbatch) for row in schedule.rows for a in row if a.kind == "I"}
    known = _used(schedule, stands, split)
    stands = [
        dataclasses.replace(
            stand,
            ended=max([stand.ended, *(i for i, a in enumerate(stand.actions, 1) if a in known)]),
        )
        for stand in stands
    ]
    lacking: dict[Action, list[str]] = {}
    for stand in stands:
        for action in stand.actions[stand.ended :]:
            lacking.setdefault(action, []).append(stand.name)
    waits: list[Wait] = []
    for stand in stands:
        if stand.ended == len(stand.actions):
            continue
        action = stand.actions[stand.ended]
        needed = needs(action, schedule.num_stages, split, schedule.num_slices)
        missing = [(other, tuple(lacking[other])) for other in needed if other in lacking]
        waits.append(Wait(stand, action, stand.started > stand.ended, tuple(missing)))
    return waits


def _used(schedule: Schedule, stands: Sequence[Stand], split: set[tuple[int, int]]) -> set[Action]:
    """Returns all actions that must be finished, because an action that needs them has started."""
    places = {a: (row, i) for row in schedule.rows for i, a in enumerate(row)}
    todo = [a for stand in stands for a in stand.actions[: stand.ended]]
    # A started forward pass has its inputs. A started backward pass may still recompute.
    begun = [a for stand in stands for a in stand.actions[stand.ended : stand.started]]
    todo += [a for a in begun if a.kind in "FW"]
    finished: set[Action] = set()
    while todo:
        action = todo.pop()
        for needed in needs(action, schedule.num_stages, split, schedule.num_slices):
            if needed in finished:
                continue
            # Its home has finished the earlier actions, too.
            row, i = places[needed]
            before = [a for a in row[: i + 1] if a not in finished]
            finished.update(before)
            todo += before
    return finished


# For a device: number of started actions, number of finished actions, seconds in between.
_Counts = tuple[float, float, float]
_SIZE = 3
# The increments of a note to the first two, and the sign of the time for the third.
_ADDED = {
    "start": (1.0, 0.0, -1.0),
    "go on": (0.0, 0.0, -1.0),
    "end": (0.0, 1.0, 1.0),
    "untimed": (0.0, 1.0, 0.0),
}
# For a note's second argument: the time of the previous note, if there is one.
_DTYPES = (tf.int64, tf.float64)


class Marks:
    """Counts started and finished actions on each device.

    A device runs its actions in order, so the count identifies the current one. A variable beside
    the device holds the counts. You can read it during a step, even if the step hangs. Operations
    on the worker write it, and nothing is sent.

    Pass it to a pipeline as `Options.clock` before the graph is built.

    Args:
        schedule: the schedule of the run.
        devices: for each stage its devices, in the order of its home.
        place_of: maps a device to its connection; devices with the same connection are read one
            after the other.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.recurrent import Options, Stage, pipeline
        >>> from pipemesh.schedule import forward_only
        >>> def double(theta, carry, inputs, microbatch, step):
        ...     return [2.0 * inputs[0]], []
        >>> schedule = forward_only(1, 4)
        >>> marks = Marks(schedule, [["CPU:0"]])
        >>> @tf.function
        ... def run(x):
        ...     stages = [Stage("double", double, [], [], "CPU:0")]
        ...     return pipeline(stages, [x], schedule, options=Options(clock=marks))[0]
        >>> _ = run(tf.ones([8]))
        >>> marks.stands(5.0)[0].ended, marks.end_step(), marks.stands(5.0)[0].ended
        (4, None, 0)
    """

    def __init__(
        self,
        schedule: Schedule,
        devices: Sequence[Sequence[str]],
        place_of: Callable[[str], object] = lambda device: None,
    ) -> None:
        self.schedule = schedule
        # Another client of the worker may have had a variable with this name.
        self._name = f"pipemesh_marks_{os.getpid()}_{time.time_ns()}"
        # Seconds since this time, so that sums are exact.
        self._begin = time.time()
        self._rows: dict[str, int] = {}
        self._homes: dict[int, Sequence[str]] = {}
        for stage, home in enumerate(devices):
            self._homes[schedule.stage_devices[stage]] = home
            for device in home:
                self._rows.setdefault(device, schedule.stage_devices[stage])
        self._place_of = place_of
        # The actions with marks: an action without inputs on a device has none there.
        self._marked: dict[str, dict[str, set[tuple[str, int]]]] = {
            device: {"started": set(), "ended": set()} for device in self._rows
        }
        self._handles: dict[str, tf.Tensor] = {}
        self._calls: dict[tuple[str, str], Call] = {}
        self._first: dict[tuple[str, str, int], tuple[tf.Tensor, tf.Tensor]] = {}
        self._lock = threading.Lock()
        self._seen: dict[str, _Counts] = {}
        self._reading: dict[object, threading.Thread] = {}
        self._base: dict[str, _Counts] = collections.defaultdict(lambda: (0.0, 0.0, 0.0))
        self._steps = 0

    def stamp(
        self,
        kind: str,
        stage: int,
        microbatch: tf.Tensor,
        is_end: bool,
        device: str,
        replica: int = 0,
    ) -> tf.Operation:
        """Returns an operation that counts an action when it runs; see `ActionClock.stamp`."""
        del replica
        place, marked, earlier = (kind, stage), self._marked[device], microbatch
        marked["ended" if is_end else "started"].add(place)
        if is_end:
            name = "end" if place in marked["started"] else "untimed"
        else:
            # An action that starts before all of its inputs arrive has two marks.
            number, begin = self._first.get((device, *place), (None, microbatch))
            name, earlier = ("go on", begin) if number is microbatch else ("start", microbatch)
        if (device, name) not in self._calls:
            self._calls[device, name] = self._call(device, name)
        results = self._calls[device, name]([microbatch, earlier])
        if name == "start":
            self._first[(device, *place)] = microbatch, results[1]
        return results[0].op

    def _call(self, device: str, name: str) -> Call:
        host = processor_beside(device)
        with tf.init_scope(), tf.device(host):
            if device not in self._handles:
                handle, zeros = self._handle(device), tf.zeros([_SIZE], tf.float64)
                tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
                # Another thread may read at any time. A failure on a worker repeats in the next
                # request, so no thread may see the variable before it has a value.
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()
                self._handles = {**self._handles, device: handle}
        started, ended, sign = _ADDED[name]
        goes_on = name == "go on"

        def note(number: tf.Tensor, earlier: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device(host):
                now = tf.timestamp() - tf.constant(self._begin, tf.float64)
                # The seconds of an action are the time of its end minus the time of its start.
                value = tf.constant([0.0, 0.0, sign], tf.float64) * now
                if goes_on:
                    value += tf.constant([0.0, 0.0, 1.0], tf.float64) * earlier
                value += tf.constant([started, ended, 0.0], tf.float64)
                # By name: TensorFlow would order all users of a captured variable.
                add = tf.raw_ops.AssignAddVariableOp(resource=self._handle(device), value=value)
                with tf.control_dependencies([add]):
                    return tf.identity(number), tf.identity(now)

        # In its own function, for the same reason as the record of a clock.
        function = tf.function(note, autograph=False)
        specs = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], _DTYPES[goes_on])]
        return Call(function.get_concrete_function(*specs))

    def _handle(self, device: str) -> tf.Tensor:
        name = f"{self._name}_{device}"
        return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[_SIZE], shared_name=name)

    def end_step(self) -> None:
        """Records that a step has finished."""
        self._steps += 1

    def end_failed_step(self, seconds: float) -> None:
        """Records that a step has failed, so that some of its actions were never counted.

        It waits at most `seconds` for the counts, as do all other methods that read them.
        """
        self.look(seconds)
        with self._lock:
            self._base.update(self._seen)
        self._steps = 0

    def look(self, seconds: float = 0.0) -> None:
        """Reads the counts of all devices; a late one is not read again until it has answered."""
        places: dict[object, list[str]] = {}
        for device in self._handles:
            places.setdefault(self._place_of(device), []).append(device)
        for place, devices in places.items():
            reader = self._reading.get(place)
            if reader is None or not reader.is_alive():
                thread = threading.Thread(
                    target=self._read, args=[devices], name="reader of marks", daemon=True
                )
                self._reading[place] = thread
                thread.start()
        limit = time.monotonic() + seconds
        for thread in list(self._reading.values()):
            thread.join(max(0.0, limit - time.monotonic()))

    def _read(self, devices: Sequence[str]) -> None:
        for device in devices:
            try:
                with tf.device(processor_beside(device)):
                    counts = tf.raw_ops.ReadVariableOp(
                        resource=self._handles[device], dtype=tf.float64
                    ).numpy()
            except tf.errors.OpError:
                # The error of a lost worker; the watcher of the worker reports it.
                return
            with self._lock:
                self._seen[device] = (float(counts[0]), float(counts[1]), float(counts[2]))

    def stands(self, seconds: float) -> list[Stand]:
        """Returns the progress of each device; the latest known if it does not answer."""
        self.look(seconds)
        progress: list[Stand] = []
        for device in self._handles:
            actions = self._actions(device, "ended")
            with self._lock:
                seen, base = self._seen.get(device, self._base[device]), self._base[device]
            ended = self._done(seen[1] - base[1], len(actions))
            # Fewer actions may have a mark of their start.
            begun = self._actions(device, "started")
            number = self._done(seen[0] - base[0], len(begun))
            last = begun[number - 1] if number else None
            started = actions.index(last) + 1 if last in actions else 0
            silent = self._reading[self._place_of(device)].is_alive()
            progress.append(Stand(device, actions, started, ended, silent))
        return progress

    def waits(self, seconds: float) -> list[Wait]:
        """Returns the current action of each unfinished device; see `waits_of`."""
        return waits_of(self.schedule, self.stands(seconds))

    def seconds_at_work(self, seconds: float) -> dict[str, float]:
        """Returns each device's seconds of work since the marks were made; call between steps."""
        self.look(seconds)
        with self._lock:
            return {device: counts[2] for device, counts in self._seen.items()}

    def shares(self, costs: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """Returns the work of each device in a step, given costs by kind of action and stage."""
        return {
            device: sum(costs[a.kind][a.stage] for a in self._actions(device, "ended"))
            / len(self._homes[self._rows[device]])
            for device in self._handles
        }

    def _done(self, counted: float, of: int) -> int:
        """Returns the number of counted actions of this step, at most `of`."""
        return min(max(round(counted) - self._steps * of, 0), of)

    def _actions(self, device: str, what: str) -> tuple[Action, ...]:
        marked = self._marked[device][what]
        row = self.schedule.rows[self._rows[device]]
        return tuple(action for action in row if (action.kind, action.stage) in marked)
