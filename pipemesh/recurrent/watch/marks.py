"""How far each device has come in a step that is under way, and how long it was at work."""

from __future__ import annotations

import collections
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.devices import processor_beside
from pipemesh.backend.operations import Call
from pipemesh.recurrent.watch.waits import Stand, Wait, waits_of
from pipemesh.schedule import Action, Schedule

# Of a device: how many actions have begun, how many are done, seconds in between.
_Counts = tuple[float, float, float]
_SIZE = 3
# What a note adds to the first two, and with which sign the time to the third.
_ADDED = {
    "start": (1.0, 0.0, -1.0),
    "go on": (0.0, 0.0, -1.0),
    "end": (0.0, 1.0, 1.0),
    "untimed": (0.0, 1.0, 0.0),
}
# Of a note's second argument: the time of the note before for one that has one.
_DTYPES = (tf.int64, tf.float64)


class Marks:
    """Counts, on each device, the actions that have begun and those that are done.

    A device's actions have an order, so a number says which one it is about. The numbers lie in a
    variable beside the device, which can be read while a step is under way, and when it hangs. They
    are written by operations of TensorFlow alone, on the worker; nothing is sent.

    It is to be given to a pipeline as a clock is (`Options.clock`), before its graph is built.

    Args:
        schedule: what is run.
        devices: of each stage, in the order of its home.
        place_of: says of a device by which connection it is reached; those of one place are read
            one after the other.

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
        # Another client of the worker may have had one of the same name.
        self._name = f"pipemesh_marks_{os.getpid()}_{time.time_ns()}"
        # Seconds since then, so that sums of them are exact.
        self._begin = time.time()
        self._rows: dict[str, int] = {}
        self._homes: dict[int, Sequence[str]] = {}
        for stage, home in enumerate(devices):
            self._homes[schedule.stage_devices[stage]] = home
            for device in home:
                self._rows.setdefault(device, schedule.stage_devices[stage])
        self._place_of = place_of
        # Which actions have marks: an action of which nothing arrives at a device has none there.
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
        """An operation that counts an action when it runs; see `ActionClock.stamp`."""
        del replica
        place, there = (kind, stage), self._marked[device]
        if is_end:
            there["ended"].add(place)
            name = "end" if place in there["started"] else "untimed"
            return self._noted(device, name, microbatch, None)[0].op
        there["started"].add(place)
        # An action that begins with what it has, and goes on when the rest arrives, has two.
        number, earlier = self._first.get((device, *place), (None, None))
        name = "start" if number is not microbatch else "go on"
        results = self._noted(device, name, microbatch, earlier if name == "go on" else None)
        if name == "start":
            self._first[(device, *place)] = microbatch, results[1]
        return results[0].op

    def _noted(
        self, device: str, name: str, microbatch: tf.Tensor, earlier: tf.Tensor | None
    ) -> list[tf.Tensor]:
        if (device, name) not in self._calls:
            self._calls[device, name] = self._call(device, name)
        return self._calls[device, name]([microbatch, microbatch if earlier is None else earlier])

    def _call(self, device: str, name: str) -> Call:
        host = processor_beside(device)
        with tf.init_scope(), tf.device(host):
            if device not in self._handles:
                handle, zeros = self._handle(device), tf.zeros([_SIZE], tf.float64)
                tf.raw_ops.AssignVariableOp(resource=handle, value=zeros)
                # Another thread may ask at any time, and what fails on a worker fails again in what
                # is asked of it next: nobody is to know of it before it has a value.
                tf.raw_ops.ReadVariableOp(resource=handle, dtype=tf.float64).numpy()
                self._handles = {**self._handles, device: handle}
        started, ended, sign = _ADDED[name]
        goes_on = name == "go on"

        def note(number: tf.Tensor, earlier: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
            with tf.device(host):
                now = tf.timestamp() - tf.constant(self._begin, tf.float64)
                # The seconds of an action are those of its end without those of its beginning.
                value = tf.constant([0.0, 0.0, sign], tf.float64) * now
                if goes_on:
                    value += tf.constant([0.0, 0.0, 1.0], tf.float64) * earlier
                value += tf.constant([started, ended, 0.0], tf.float64)
                # By name: of what is handed in TensorFlow would order all users.
                add = tf.raw_ops.AssignAddVariableOp(resource=self._handle(device), value=value)
                with tf.control_dependencies([add]):
                    return tf.identity(number), tf.identity(now)

        # A function of its own, for the reason that a clock's note has.
        function = tf.function(note, autograph=False)
        specs = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], _DTYPES[goes_on])]
        return Call(function.get_concrete_function(*specs), [0, 1])

    def _handle(self, device: str) -> tf.Tensor:
        name = f"{self._name}_{device}"
        return tf.raw_ops.VarHandleOp(dtype=tf.float64, shape=[_SIZE], shared_name=name)

    def end_step(self) -> None:
        """Notes that a step was finished."""
        self._steps += 1

    def end_failed_step(self, seconds: float) -> None:
        """Notes that a step was not finished: some of its actions were never counted.

        Args:
            seconds: to wait for the numbers.
        """
        self.look(seconds)
        with self._lock:
            self._base.update(self._seen)
        self._steps = 0

    def look(self, seconds: float = 0.0) -> None:
        """Asks all devices for their numbers.

        Args:
            seconds: to wait for them; who takes longer is not asked again until it has answered.
        """
        places: dict[object, list[str]] = {}
        for device in self._handles:
            places.setdefault(self._place_of(device), []).append(device)
        for place, devices in places.items():
            there = self._reading.get(place)
            if there is None or not there.is_alive():
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
                    found = tf.raw_ops.ReadVariableOp(
                        resource=self._handles[device], dtype=tf.float64
                    ).numpy()
            except tf.errors.OpError:
                # Of a worker that is lost; whoever watches it says so.
                return
            with self._lock:
                self._seen[device] = (float(found[0]), float(found[1]), float(found[2]))

    def stands(self, seconds: float) -> list[Stand]:
        """How far each device has come.

        Args:
            seconds: to wait for answers.

        Returns:
            Of each device that has a part in the pipeline; of one that did not answer, what it said
            last.
        """
        self.look(seconds)
        found: list[Stand] = []
        for device in self._handles:
            row = self._rows[device]
            actions = self._actions(device, "ended")
            with self._lock:
                seen, base = self._seen.get(device, self._base[device]), self._base[device]
            ended = self._done(seen[1] - base[1], len(actions))
            # Those that have a mark of their beginning may be fewer.
            begun = self._actions(device, "started")
            number = self._done(seen[0] - base[0], len(begun))
            last = begun[number - 1] if number else None
            started = actions.index(last) + 1 if last in actions else 0
            silent = self._reading[self._place_of(device)].is_alive()
            found.append(Stand(device, row, actions, started, ended, silent))
        return found

    def waits(self, seconds: float) -> list[Wait]:
        """What each device is about that is not done; see `waits_of`.

        Args:
            seconds: to wait for answers.
        """
        return waits_of(self.schedule, self.stands(seconds))

    def seconds_at_work(self, seconds: float) -> dict[str, float]:
        """How long each device was at work since the marks were made, to be asked between steps.

        Args:
            seconds: to wait for answers.

        Returns:
            By device; of one that does not answer as it was last.
        """
        self.look(seconds)
        with self._lock:
            return {device: counts[2] for device, counts in self._seen.items()}

    def shares(self, costs: Mapping[str, Sequence[float]]) -> dict[str, float]:
        """What each device has to do in a step.

        Args:
            costs: by kind of action, what it takes on each stage.
        """
        return {
            device: sum(costs[a.kind][a.stage] for a in self._actions(device, "ended"))
            / len(self._homes[self._rows[device]])
            for device in self._handles
        }

    def _done(self, counted: float, of: int) -> int:
        """How many actions of this step were counted, of so many a step."""
        return min(max(round(counted) - self._steps * of, 0), of)

    def _actions(self, device: str, what: str) -> tuple[Action, ...]:
        marked = self._marked[device][what]
        row = self.schedule.rows[self._rows[device]]
        return tuple(action for action in row if (action.kind, action.stage) in marked)
