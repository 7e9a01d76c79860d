"""Stages that wait instead of computing: what is left is what running a schedule costs itself.

Eight devices wait on any number of cores at once, so the measured makespan can be held against
the simulated one. A cell is a Python function that sleeps, called by `tf.numpy_function`.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from pipemesh.schedule import (
    Action,
    Costs,
    Schedule,
    build,
    list_schedule,
    recompute,
    seq_one_f_one_b,
    simulate,
)
from pipemesh.schedule.builders import BUILDERS
from pipemesh.schedule.names import NAMES

DEVICES, MICROBATCHES = 8, 32
FORWARD, BACKWARD = 0.020, 0.040  # Seconds of a device's share of the model.
SEARCHED = "list_schedule"
# Its backward passes find computed again, before the gradient is there, what they need.
RECOMPUTED = "recompute(one_f_one_b)"
# Each cell hands a state to the next slice of its microbatch, as attention does.
SLICED, SLICES = "seq_one_f_one_b", 4
# A slice takes as long as a stage of two on a device, so its microbatches are twice as long as
# others: what an action costs beside its cell is the same for every table, however short cells are.
SLICED_SHARE = 2
TABLES = [*(name for name in BUILDERS if name not in ("decode", SLICED)), SLICED]
TABLES += [SEARCHED, RECOMPUTED]
FORMS = {"actions": False, "loop": True}


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule with what its actions cost.

    Attributes:
        name: of its builder.
        schedule: the schedule.
        costs: in seconds; a device with several stages has its share of the model in parts, and
            so has a stage whose sequences are cut into slices.
    """

    name: str
    schedule: Schedule
    costs: Costs

    @classmethod
    def of(cls, name: str, devices: int = DEVICES, microbatches: int = MICROBATCHES) -> Table:
        """The table of that name; the searched one has two stages a device."""
        share = {SEARCHED: 2, RECOMPUTED: 1, SLICED: SLICED_SHARE}.get(name)
        share = share or NAMES[name].stages_a_device
        costs = Costs(FORWARD / share, BACKWARD / share)
        if name == SEARCHED:
            schedule = list_schedule(costs, devices, microbatches, num_virtual_stages=share)
        elif name == SLICED:
            schedule = seq_one_f_one_b(devices, microbatches, SLICES)
        elif name == RECOMPUTED:
            schedule = recompute(build("one_f_one_b", devices, microbatches), costs=costs)
        else:
            schedule = build(name, devices, microbatches)
        return cls(name, schedule, costs)

    @property
    def num_actions(self) -> int:
        """How many actions there are."""
        return sum(map(len, self.schedule.rows))

    @property
    def is_sliced(self) -> bool:
        """Whether sequences are cut into slices."""
        return self.schedule.num_slices > 1

    @property
    def batch(self) -> list[int]:
        """The sizes of a batch: an example a microbatch, a position a slice."""
        schedule = self.schedule
        return [schedule.num_microbatches, *([schedule.num_slices] if self.is_sliced else [])]

    @property
    def splits(self) -> bool:
        """Whether some backward pass is done in two halves."""
        return any(action.kind == "I" for row in self.schedule.rows for action in row)

    def halved(self) -> Schedule:
        """The schedule as it is performed when the cells of a `B` are those of an `I` and a `W`.

        Slices are microbatches of their own, as cells see them.

        The input gradient then leaves in the middle of a `B`, earlier than the simulator reckons.
        """
        rows = tuple(
            tuple(
                Action(action.stage, kind, action.microbatch)
                for action in row
                for kind in ("IW" if action.kind == "B" and self.splits else action.kind)
            )
            for row in self.schedule.by_pieces().rows
        )
        return dataclasses.replace(self.schedule.by_pieces(), rows=rows)


class Clock:
    """Waits, and notes when what waited.

    Attributes:
        spans: of each action since they were cleared, its begin and end.
    """

    def __init__(self) -> None:
        self.spans: dict[Action, tuple[float, float]] = {}
        self._too_long: dict[float, float] = {}

    def cell(self, stage: int, kind: str, seconds: float) -> Any:
        """A function that waits and returns its first argument."""

        def wait(x: Any, microbatch: Any, *_: Any) -> Any:
            begin = time.perf_counter()
            time.sleep(seconds - self._too_long.get(seconds, 0.0))
            end = time.perf_counter()
            action = Action(stage, kind, int(microbatch))
            if action in self.spans and kind == "F":
                action = Action(stage, "R", int(microbatch))
            self.spans[action] = begin, end
            return x

        return wait

    def errors(self, table: Table) -> dict[float, list[float]]:
        """By how much waits came out too long, for each length."""
        durations = table.costs.per_stage(table.schedule.num_stages).durations()
        found: dict[float, list[float]] = {}
        for action, (begin, end) in self.spans.items():
            wanted = durations[action.kind][action.stage]
            found.setdefault(wanted, []).append(end - begin - wanted)
        return found

    def calibrate(self, table: Table) -> None:
        """Shortens sleeps by what they were too long, so that waits are right at the median."""
        for wanted, errors in self.errors(table).items():
            before = self._too_long.get(wanted, 0.0)
            self._too_long[wanted] = before + statistics.median(errors)


def waiting_stage(clock: Clock, table: Table, number: int) -> Any:
    """The function of a stage for the executor; the last one ends in a sum.

    A weight's gradient waits for the input's, so that a whole backward pass takes as long as both
    halves. In tables that never split it, it is one wait, at whose end both are there.
    """
    import tensorflow as tf

    from pipemesh.recurrent import current_slice

    durations = table.costs.per_stage(table.schedule.num_stages).durations()

    def wait(kind: str, *arguments: Any) -> Any:
        cell = clock.cell(number, kind, durations[kind][number])
        # Not stateful: TensorFlow executes what is stateful one after the other.
        result = tf.numpy_function(cell, arguments, tf.float32, stateful=False)
        result.set_shape(arguments[0].shape)
        return result

    def forward(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        del step
        piece = current_slice()
        microbatch = microbatch * piece.count + piece.index

        @tf.custom_gradient
        def layer(x: Any, weight: Any) -> Any:
            y = wait("F", x * weight, microbatch)

            def grad(dy: Any) -> Any:
                first = "I" if table.splits else "B"
                dx = wait(first, dy * weight, microbatch, y)
                dw = tf.reduce_sum(dx * x)
                return dx, wait("W", dw, microbatch) if table.splits else dw

            return y, grad

        # As keys and values do, what slices hand on makes each wait for the one before.
        y = layer(tf.add_n([inputs[0], *carry]), theta[0])
        last = number == table.schedule.num_stages - 1
        return [tf.reduce_sum(y) if last else y], [0.1 * y for _ in carry]

    return forward


def compiled(
    table: Table, stage_function: Any, loop: Any, weights: Any, x: Any, state: Any = ()
) -> Any:
    """The traced step: the loss and all gradients, or the loss alone if nothing goes backward.

    Args:
        table: the schedule.
        stage_function: gives that of a stage, by its number.
        loop: True for one loop, False for action by action, None to choose by size.
        weights: one a stage.
        x: the batch.
        state: the shapes of what each stage hands from slice to slice.
    """
    import tensorflow as tf

    from pipemesh.recurrent import Options, Stage, pipeline_loss

    schedule = table.schedule

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        carry = [tf.zeros(shape) for shape in state]
        with tf.GradientTape() as tape:
            stages = [
                Stage(
                    f"stage{number}",
                    stage_function(number),
                    [tf.convert_to_tensor(weight)],
                    carry,
                    f"CPU:{schedule.stage_devices[number]}",
                    recurrent=bool(carry),
                    takes_slices=True,
                )
                for number, weight in enumerate(weights)
            ]
            options = Options(remat="none", loop=loop)
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=options)
        return loss if schedule.is_forward_only else (loss, tape.gradient(loss, weights))

    return step.get_concrete_function(x)


def as_it_was(table: Table, spans: dict[Action, tuple[float, float]]) -> Costs:
    """The costs with the mean length that the waits of each stage had."""
    found: dict[tuple[str, int], list[float]] = {}
    for action, (begin, end) in spans.items():
        found.setdefault((action.kind, action.stage), []).append(end - begin)

    def mean(kind: str) -> list[float]:
        # A kind that the table lacks costs nothing.
        return [
            statistics.mean(found.get((kind, stage), [0.0]))
            for stage in range(table.schedule.num_stages)
        ]

    return Costs(mean("F"), mean("B"), mean("I"), mean("W"), recompute=mean("R"))


def latencies(table: Table, spans: dict[Action, tuple[float, float]]) -> dict[str, list[float]]:
    """From when an action could start until its cell did: what TensorFlow takes in between.

    Returns:
        `local` where its device's previous action was what it waited for, `remote` where it was
        an action of another device.
    """
    schedule = table.halved()
    num_stages, home = schedule.num_stages, schedule.stage_devices
    found: dict[str, list[float]] = {"local": [], "remote": []}
    for row in schedule.rows:
        for previous, action in zip([None, *row], row, strict=False):
            needs = _needs(action, num_stages, spans)
            ready = [(spans[n][1], home[n.stage] != home[action.stage]) for n in needs]
            if previous is not None:
                ready.append((spans[previous][1], False))
            if ready:
                end, remote = max(ready)
                found["remote" if remote else "local"].append(spans[action][0] - end)
    return found


def _needs(action: Action, num_stages: int, spans: Any) -> Iterator[Action]:
    stage, m = action.stage, action.microbatch
    if action.kind == "F" and stage:
        yield Action(stage - 1, "F", m)
    if action.kind in "BI":
        above = Action(stage + 1, action.kind, m)
        yield above if stage + 1 < num_stages else Action(stage, "F", m)
    if action.kind == "W":
        yield Action(stage, "I", m)
    if action.kind == "R":
        yield Action(stage, "F", m)


def measure(
    names: Sequence[str], rounds: int, devices: int, microbatches: int
) -> Iterator[dict[str, Any]]:
    """For each table and form, one row of the result."""
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    start_cpu_devices(devices)
    clock = Clock()
    # Equal microbatches would be computed once, because TensorFlow merges equal operations.
    rng = np.random.default_rng(0)
    for name in names:
        table = Table.of(name, devices, microbatches)
        x = tf.constant(rng.normal(size=table.batch).astype(np.float32))
        state = [[1, 1]] if table.is_sliced else []
        weights = [tf.Variable(1.0) for _ in range(table.schedule.num_stages)]
        for form, loop in FORMS.items():
            step = compiled(
                table, lambda i, t=table: waiting_stage(clock, t, i), loop, weights, x, state
            )
            clock.spans.clear()
            step(x)
            raw = _mean(clock.errors(table))
            clock.calibrate(table)
            seconds, own, errors, local, remote = [], [], [], [], []
            for _ in range(rounds):
                clock.spans.clear()
                begin = time.perf_counter()
                results = step(x)
                tf.nest.map_structure(lambda t: t.numpy(), results)
                seconds.append(time.perf_counter() - begin)
                _check(clock.spans, table)
                own.append(simulate(table.halved(), as_it_was(table, clock.spans)).makespan)
                errors.append(_mean(clock.errors(table)))
                found = latencies(table, clock.spans)
                local += found["local"]
                remote += found["remote"]
            yield {
                "schedule": name,
                "form": form,
                "actions": table.num_actions,
                "simulated": simulate(table.schedule, table.costs).makespan,
                "simulated_halved": simulate(table.halved(), table.costs).makespan,
                "simulated_own": own,
                "seconds": seconds,
                "overshoot_before": raw,
                "overshoot": statistics.mean(errors),
                "local": local,
                "remote": remote,
            }


def _mean(errors: dict[float, list[float]]) -> float:
    return statistics.mean(error for found in errors.values() for error in found)


def _check(spans: dict[Action, tuple[float, float]], table: Table) -> None:
    """Every action has waited, each device one at a time and in the order of its row."""
    rows = table.halved().rows
    wanted = {action for row in rows for action in row}
    if spans.keys() != wanted:
        raise SystemExit(
            f"{table.name}: {len(spans)} cells were executed instead of {len(wanted)} actions"
        )
    for row in rows:
        for one, two in itertools.pairwise(row):
            if spans[one][1] > spans[two][0]:
                raise SystemExit(f"{table.name}: {two} began before {one} had ended")
