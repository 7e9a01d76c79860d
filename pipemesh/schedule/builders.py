"""Every published schedule as a function from counts to a validated table.

All take `(num_devices, num_microbatches)`, and `num_virtual_stages` (stages a device) where the
schedule leaves it open. In the docstrings `D` is the number of devices, `M` of microbatches and
`V` of virtual stages; `f`, `b`, `i` and `w` are the durations of one action of one stage: forward,
full backward, input gradient and weight gradient. Bubbles are idle time of one device, peak
activations count (stage, microbatch) pairs of one device between the start of `F` and the end
of `B` or `W`. Transfers are free in every formula. A count below 1 is a `ScheduleError`.

Example:
    >>> from pipemesh.schedule.builders import BUILDERS, build
    >>> sorted(BUILDERS)[:3]
    ['decode', 'dual_pipe_v', 'forward_only']
    >>> build("one_f_one_b", 2, 2).num_stages
    2
"""

from __future__ import annotations

import functools
import inspect
from collections import deque
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, ParamSpec

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.blocks import repeated
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.names import FILE, NAMES, agreed_stages, parse
from pipemesh.schedule.schedule import Schedule, loop, vee
from pipemesh.schedule.simulate import simulate
from pipemesh.schedule.validate import validate

_P = ParamSpec("_P")


def _published(function: Callable[_P, Schedule]) -> Callable[_P, Schedule]:
    """Makes a builder check its counts first and validate its schedule last."""
    signature = inspect.signature(function)
    of_counts: Callable[..., Schedule] = function

    @functools.wraps(function)
    def checked(*args: _P.args, **kwargs: _P.kwargs) -> Schedule:
        try:
            counts = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(f"{function.__name__}() {error}") from None
        counts.apply_defaults()
        return validate(of_counts(*check_counts(**counts.arguments)))

    return checked


def gpipe(num_devices: int, num_microbatches: int) -> Schedule:
    """GPipe: first forwards, then backwards, last microbatch first; one stage a device.

    Makespan `(M + D - 1)(f + b)`, bubble `(D - 1)(f + b)`; every device holds the activations
    of all `M` microbatches. Holds for every `M`.

    Source: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline
    Parallelism", 2019, figure 2(c).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(gpipe(2, 3))
        0: 0F0 0F1 0F2 0B2 0B1 0B0
        1: 1F0 1F1 1F2 1B2 1B1 1B0
    """
    return looped_bfs(num_devices, num_microbatches, num_virtual_stages=1)


@_published
def looped_bfs(num_devices: int, num_microbatches: int, num_virtual_stages: int = 2) -> Schedule:
    """GPipe on a loop: each device finishes all microbatches of a stage, then its next stage.

    For `M >= D` the bubble is `(D - 1)(f + b)`, where `f` and `b` belong to one of `V` stages of
    a device: `V` times smaller than GPipe's on the same model. Every device holds the
    activations of all its `V M` (stage, microbatch) pairs. With fewer microbatches than devices
    every round of the loop waits for the first microbatch to come round, and the makespan is
    `(V D + M - 1)(f + b)`.

    Because the backward passes of one stage end together, its gradient can be reduced while
    the device works on the stage before.

    Source: Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022. The order of the
    microbatches in the backward half changes neither time nor memory; it is the reverse one, as
    in `gpipe`.

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Example:
        >>> print(looped_bfs(2, 2, num_virtual_stages=2))
        0: 0F0 0F1 2F0 2F1 2B1 2B0 0B1 0B0
        1: 1F0 1F1 3F0 3F1 3B1 3B0 1B1 1B0
    """
    stages = range(num_devices * num_virtual_stages)
    rows = tuple(
        tuple(
            Action(s, "F", m) for s in stages[device::num_devices] for m in range(num_microbatches)
        )
        + tuple(
            Action(s, "B", m)
            for s in reversed(stages[device::num_devices])
            for m in reversed(range(num_microbatches))
        )
        for device in range(num_devices)
    )
    return Schedule(rows, loop(num_devices, num_virtual_stages), num_microbatches)


def is_looped(schedule: Schedule) -> bool:
    """Returns whether one loop over ticks can run a schedule: `looped_bfs`, or its forward passes.

    With one stage a device that is `gpipe`.
    """
    devices, number = schedule.num_devices, schedule.num_microbatches
    rounds, rest = divmod(schedule.num_stages, devices)
    looped = None if rest else looped_bfs(devices, number, rounds)
    return looped is not None and schedule in (looped, looped.only_forward())


def looped_ticks(num_devices: int, num_microbatches: int, num_rounds: Any) -> Any:
    """Returns the number of ticks in which devices run the forward passes of `looped_bfs`, one a
    tick, with so many stages each. That number may be a tensor, and the result is one then.
    """
    # A microbatch returns to a device after so many ticks.
    period = max(num_microbatches, num_devices)
    return (num_rounds - 1) * period + num_microbatches + num_devices - 1


@_published
def forward_only(num_devices: int, num_microbatches: int, num_virtual_stages: int = 1) -> Schedule:
    """Inference: forwards only, in groups of `D` microbatches a stage.

    A device runs a group of `D` microbatches through its first stage, then through its next:
    the group comes round the loop just when the device is free for it. If `D` divides `M`, or
    `V` is 1, the makespan is `(V M + D - 1) f` and the bubble `(D - 1) f`. Nothing is kept for a
    backward pass: one activation is in flight at a time.

    Source: the forward half of the schedules of Huang et al., 2019 (`V = 1`) and Narayanan et
    al., 2021 (`V > 1`).

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Example:
        >>> print(forward_only(2, 3))
        0: 0F0 0F1 0F2
        1: 1F0 1F1 1F2
    """
    stages = range(num_devices * num_virtual_stages)
    groups = [
        range(start, min(start + num_devices, num_microbatches))
        for start in range(0, num_microbatches, num_devices)
    ]
    rows = tuple(
        tuple(
            Action(s, "F", m)
            for group in groups
            for s in stages[device::num_devices]
            for m in group
        )
        for device in range(num_devices)
    )
    return Schedule(rows, loop(num_devices, num_virtual_stages), num_microbatches)


def decode(num_devices: int, num_microbatches: int, num_virtual_stages: int = 4) -> Schedule:
    """Decoding: a token of each group of prompts in turn, and then the next token of each.

    A microbatch is a group of prompts, and a round of the loop is a token: virtual stage
    `D t + d` is device `d` at its `t`-th token, whose first stage needs what the last one made of
    the token before. The makespan is that of the forward half of `looped_bfs`: `(V M + D - 1) f`
    if `M >= D`, else `(V D + M - 1) f`. So the steady rate is that of `M` groups in `max(M, D)`
    times the time of a stage, and devices are busy from as many groups as stages on.

    Source: the forward half of Lamy-Poirier, "Breadth-First Pipeline Parallelism", 2022.

    Args:
        num_devices: `D`, at least 1; also the number of stages of the model.
        num_microbatches: `M`, groups of prompts, at least 1.
        num_virtual_stages: `V`, tokens of each, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Example:
        >>> print(decode(2, 2, 3))
        0: 0F0 0F1 2F0 2F1 4F0 4F1
        1: 1F0 1F1 3F0 3F1 5F0 5F1
    """
    return looped_bfs(num_devices, num_microbatches, num_virtual_stages).only_forward()


def one_f_one_b(num_devices: int, num_microbatches: int) -> Schedule:
    """After a short warm-up each device alternates one forward and one backward.

    Makespan `(M + D - 1)(f + b)`, bubble `(D - 1)(f + b)`, both as with GPipe, but device `d`
    holds the activations of only `min(M, D - d)` microbatches. Holds for every `M`.

    Source: PipeDream-Flush of Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN
    Training", 2021; also figure 4 (top) of Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", 2021.

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(one_f_one_b(2, 3))
        0: 0F0 0F1 0B0 0F2 0B1 0B2
        1: 1F0 1B0 1F1 1B1 1F2 1B2
    """
    return interleaved_one_f_one_b(num_devices, num_microbatches, num_virtual_stages=1)


@_published
def interleaved_one_f_one_b(
    num_devices: int, num_microbatches: int, num_virtual_stages: int = 2
) -> Schedule:
    """1F1B on a loop of `V` stages a device, in groups of `D` microbatches a stage.

    The bubble is `(D - 1)(f + b)`, where `f` and `b` belong to one of `V` stages of a device:
    `V` times smaller than 1F1B's on the same model. Device `d` holds
    `min(V M, 2 (D - d - 1) + (V - 1) D + 1)` activations for `V > 1` and `min(M, D - d)` for
    `V = 1`, where the schedule is `one_f_one_b`.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters
    Using Megatron-LM", 2021, section 2.2 and figure 4 (bottom).

    Args:
        num_devices: `D`, at least 1.
        num_microbatches: `M`, at least 1; for `V > 1` a multiple of `D`, as the paper demands.
        num_virtual_stages: `V`, stages a device, at least 1.

    Returns:
        The validated schedule of `D V` stages.

    Raises:
        ScheduleError: a count is below 1, or `M` is no multiple of `D` although `V > 1`.

    Example:
        >>> print(interleaved_one_f_one_b(2, 2, num_virtual_stages=2))
        0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
        1: 1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1
    """
    looped = num_virtual_stages > 1
    if looped and num_microbatches % num_devices:
        lower = num_microbatches - num_microbatches % num_devices
        nearest = " or ".join(str(m) for m in (lower, lower + num_devices) if m)
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but interleaved 1F1B needs a multiple of "
            f"num_devices, {num_devices}; use {nearest} microbatches, or num_virtual_stages=1"
        )
    group = num_devices if looped else 1
    forwards = [
        (chunk, microbatch)
        for start in range(0, num_microbatches, group)
        for chunk in range(num_virtual_stages)
        for microbatch in range(start, start + group)
    ]
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        ahead = num_devices - device - 1
        if looped:
            # A gradient comes back through all later devices, and while it does two groups of
            # other stages' forwards pass: twice the way, and all but one stage of the group.
            ahead = 2 * ahead + (num_virtual_stages - 1) * num_devices
        stages = range(device, num_devices * num_virtual_stages, num_devices)
        f = [Action(stages[chunk], "F", m) for chunk, m in forwards]
        b = [Action(stages[-1 - chunk], "B", m) for chunk, m in forwards]
        rows.append(_in_turn(f, b, ahead))
    devices = loop(num_devices, num_virtual_stages)
    return Schedule(tuple(rows), devices, num_microbatches)


def _in_turn(
    forwards: Sequence[Action], backwards: Sequence[Action], ahead: int
) -> tuple[Action, ...]:
    """Returns some forwards ahead, then a forward and a backward in turn, then backwards alone."""
    pairs = zip(forwards[ahead:], backwards, strict=False)
    alone = backwards[max(0, len(forwards) - ahead) :]
    return (*forwards[:ahead], *chain.from_iterable(pairs), *alone)


@_published
def seq_one_f_one_b(num_devices: int, num_microbatches: int, num_slices: int = 4) -> Schedule:
    """1F1B whose unit is a slice of a microbatch's sequences.

    With causal attention a slice needs of the slices before it only their keys and values, so the
    first slice goes on to the next stage while the second one is computed. Gradients come back
    in the reverse order: microbatches from the first, the slices of each from the last, because
    the keys and values of a slice get gradients from all slices after it.

    With `f` and `b` of a whole microbatch and slices of equal cost the bubble is
    `(D - 1)(f + b) / Q`, and device `d` holds `min(M Q, D - d - 1 + Q)` slices, each `1 / Q` of
    a microbatch: at 8 devices and 4 slices 2.75 microbatches instead of 8.

    Source: Sun et al., "Seq1F1B: Efficient Sequence-Level Pipeline Parallelism for Large Language
    Model Training", 2024 (arXiv 2406.03488), section 3.

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.
        num_slices: `Q`, at least 1; with 1 the schedule is `one_f_one_b`.

    Returns:
        The validated schedule.

    Example:
        >>> print(seq_one_f_one_b(2, 2, num_slices=2))
        0: 0F0.0 0F0.1 0F1.0 0B0.1 0F1.1 0B0.0 0B1.1 0B1.0
        1: 1F0.0 1F0.1 1B0.1 1F1.0 1B0.0 1F1.1 1B1.1 1B1.0
    """
    if num_slices == 1:
        return one_f_one_b(num_devices, num_microbatches)
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        forwards, backwards = (
            [Action(device, kind, m, q) for m in range(num_microbatches) for q in slices]
            for kind, slices in (("F", range(num_slices)), ("B", range(num_slices)[::-1]))
        )
        # The first gradient is that of the last slice, which comes behind all the others.
        rows.append(_in_turn(forwards, backwards, num_devices - device - 1 + num_slices - 1))
    return Schedule(tuple(rows), loop(num_devices), num_microbatches, num_slices)


@_published
def zb_h1(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble within the memory of 1F1B: a third of its bubble.

    For `M >= D` and `w <= min(f, i)`, the published regime, the bubble is
    `(D - 1)(f + i - w)`. Where weight gradients are the longest part it is
    `(D - 1) max(f, i, f + i - w)`: then nothing is left to fill the gaps with. Every device holds
    `min(M, D)` microbatches, as many as 1F1B's first device.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.1 and figure 3 (top).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(zb_h1(2, 3))
        0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
        1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
    """
    return _zero_bubble(
        num_devices,
        num_microbatches,
        warm_up=lambda device, devices: devices - device,
        delay=lambda device: device,
    )


@_published
def zb_h2(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble with up to twice the memory of 1F1B: no device is idle between its actions.

    For `M >= 2 D - 1` and `i <= f`, the largest own-span bubble of a device is
    `(D - 1)(f + i - 2 w)`, as published, and 0 where that is negative; for other costs it is
    `(D - 1) max(0, i - f, f + i - 2 w)`. The bubble within the makespan is never 0, since the
    last device starts `(D - 1) f` late: it is `(D - 1) f` if `f + i <= 2 w` and `i <= 2 f`.
    Every device holds `min(M, 2 D - 1)` microbatches.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", 2023, section 2.2 and figure 3
    (bottom).

    Args:
        num_devices: `D`, at least 1; also the number of stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(zb_h2(2, 3))
        0: 0F0 0F1 0F2 0I0 0W0 0I1 0W1 0I2 0W2
        1: 1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
    """
    return _zero_bubble(
        num_devices,
        num_microbatches,
        warm_up=lambda device, devices: 2 * (devices - device) - 1,
        delay=lambda device: 2 * device,
    )


def _zero_bubble(
    num_devices: int,
    num_microbatches: int,
    warm_up: Callable[[int, int], int],
    delay: Callable[[int], int],
) -> Schedule:
    """Builds rounds of one `I`, one `W` that lags by `delay` microbatches, and one `F`.

    A device holds `warm_up + delay` microbatches; both published schedules choose the delay so
    that this is the same number on every device.
    """
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        ahead = min(num_microbatches, warm_up(device, num_devices))
        lag = min(num_microbatches, delay(device))
        row = [Action(device, "F", m) for m in range(ahead)]
        for m in range(num_microbatches):
            row.append(Action(device, "I", m))
            if m >= lag:
                row.append(Action(device, "W", m - lag))
            if m + ahead < num_microbatches:
                row.append(Action(device, "F", m + ahead))
        row += [Action(device, "W", m) for m in range(num_microbatches - lag, num_microbatches)]
        rows.append(tuple(row))
    return Schedule(tuple(rows), loop(num_devices), num_microbatches)


class _Row:
    """One device's row under construction: counts the actions of each of its two stages.

    `down` and `up` are the device's stages on the two legs of the V. Asking for an action of
    a microbatch that does not exist does nothing, which is how a schedule copes with fewer
    microbatches than its warm-up would like.
    """

    def __init__(self, device: int, num_devices: int, num_microbatches: int) -> None:
        self.down = device
        self.up = 2 * num_devices - 1 - device
        self.actions: list[Action] = []
        self._num_microbatches = num_microbatches
        self._next = {(s, k): 0 for s in (self.down, self.up) for k in "FB"}
        self._owed: deque[Action] = deque()

    def has_forwards(self, stage: int) -> bool:
        """Returns True if forwards are left on a stage."""
        return self._next[stage, "F"] < self._num_microbatches

    def add(self, stage: int, kinds: str) -> None:
        """Adds the next action of each kind; a `W` is the oldest that an `I` of the stage owes."""
        for kind in kinds:
            if kind == "W":
                self._pay(next((a for a in self._owed if a.stage == stage), None))
                continue
            key = stage, "F" if kind == "F" else "B"
            if self._next[key] < self._num_microbatches:
                self.actions.append(Action(stage, kind, self._next[key]))
                self._next[key] += 1
                if kind == "I":
                    self._owed.append(self.actions[-1].also("W"))

    def add_owed(self, most: int | None = None) -> None:
        """Adds weight gradients that are still owed by either stage, oldest first."""
        for action in list(self._owed)[:most]:
            self._pay(action)

    def _pay(self, action: Action | None) -> None:
        if action is not None:
            self._owed.remove(action)
            self.actions.append(action)


@_published
def zb_v(num_devices: int, num_microbatches: int) -> Schedule:
    """Zero bubble on a V within the memory of 1F1B: no device is idle between its actions.

    With `f = i = w`, the case the table is made for, and `M >= 2 D - 1` the own-span bubble of
    every device is 0 and the bubble within the makespan `(D - 1) f`. Other costs open gaps;
    `pipemesh.schedule.list_schedule` closes some of them. Device `d` holds
    `min(2 M, M + 1 + d, 2 D)` (stage, microbatch) pairs; a stage is half of a device's share of
    the model, so `2 D` pairs are as much as 1F1B's first device holds.

    A device first fills the way down to the turn, then the way up, then alternates one round
    (`F`, `I`, `W`) of its lower with one of its upper stage. Fewer microbatches than that leave
    gaps in the filling.

    Source: Qi et al., "Zero Bubble Pipeline Parallelism", arXiv version 2023, the section on
    ZB-V; named V-ZB in Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, with the
    same memory and the same bubble, so `v_zb` is another spelling of this name.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> zb_v(2, 4).stage_devices
        (0, 1, 1, 0)
    """
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        row = _Row(device, num_devices, num_microbatches)
        to_turn = num_devices - device
        row.add(row.down, "F" * (2 * to_turn - 1))
        for _ in range(device):
            row.add(row.up, "F")
            row.add(row.down, "F")
        row.add(row.up, "FIW" * to_turn)
        while row.has_forwards(row.up):
            row.add(row.down, "FIW")
            row.add(row.up, "FIW")
        for _ in range(device):
            row.add(row.down, "I")
            row.add(row.up, "I")
        row.add(row.down, "IW" * to_turn)
        row.add(row.up, "W" * num_microbatches)
        row.add_owed()
        rows.append(tuple(row.actions))
    return Schedule(tuple(rows), vee(num_devices), num_microbatches)


@_published
def dual_pipe_v(num_devices: int, num_microbatches: int) -> Schedule:
    """DualPipe cut in half: a V whose steady state pairs each forward with a backward.

    The published bubble is `(D - 1)(F&B + b - 3 w)`, where `F&B` is the time of a forward and a
    backward that overlap as one block, which needs both inputs at its start and hands on both
    results at its end. A row here has the two one after the other, so a forward's result leaves
    earlier, and for `i <= f <= i + w` the bubble is only `(D - 1) max(f, f + i - w)`. Every
    device holds `2 D + 1` (stage, microbatch) pairs.

    Source: DualPipeV in the DualPipe repository of DeepSeek-AI, 2025, after "Cut-in-half" of
    Qi, Wan et al. (Sea AI Lab), 2025.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least `2 D`, as the schedule's authors demand.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: a count is below 1, or `M < 2 D`.

    Example:
        >>> dual_pipe_v(2, 4).stage_devices
        (0, 1, 1, 0)
    """
    if num_microbatches < 2 * num_devices:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but DualPipeV needs at least twice "
            f"num_devices, {2 * num_devices}; use more microbatches, or zb_v"
        )
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        row = _Row(device, num_devices, num_microbatches)
        after, upto = num_devices - device - 1, device + 1
        row.add(row.down, "F" * (2 * after))
        for _ in range(upto):
            row.add(row.down, "F")
            row.add(row.up, "F")
        row.add(row.up, "IWF" * after)
        for _ in range(num_microbatches - 2 * num_devices + upto):
            row.add(row.down, "F")
            row.add(row.up, "BF")
            row.add(row.down, "B")
        for _ in range(after):
            row.add(row.up, "BF")
            row.add(row.down, "B")
        # The first half of these backwards stays whole, the second half leaves its weight
        # gradients for the gaps of the drain.
        for index in range(2 * upto):
            row.add(row.down if index % 2 else row.up, "B" if index < upto else "I")
        for _ in range(after):
            row.add_owed(1)
            row.add(row.down, "I")
        row.add_owed()
        rows.append(tuple(row.actions))
    return Schedule(tuple(rows), vee(num_devices), num_microbatches)


@_published
def v_min(num_devices: int, num_microbatches: int) -> Schedule:
    """A third of 1F1B's memory: no device holds more than `(D + 4) // 3` microbatches' activations.

    That is `2 ((D + 4) // 3)` (stage, microbatch) pairs; two stages are a device's share of the
    model. Made for `f = i = w`: then, for `D > 2` and `M >= D`, the bubble is `(4 D - 7) f` if 3
    divides `D`, else `(4 D - 5) f`. Where the durations differ, devices wait for each other in
    every round.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Min; offsets of the
    block from the authors' scheduler. This package fills its ends in its own way.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(v_min(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    # Without a gap, forwards and input gradients would meet if 3 divides D.
    gap = 0 if num_devices % 3 else 2
    offsets = [place + (gap if place >= 2 * num_devices else 0) for place in range(4 * num_devices)]
    return _shortest(offsets, num_microbatches, 2 * ((num_devices + 4) // 3))


@_published
def v_half(num_devices: int, num_microbatches: int) -> Schedule:
    """Half of 1F1B's memory: no device holds more than `D // 2 + 1` microbatches' activations.

    That is `2 (D // 2 + 1)` (stage, microbatch) pairs; two stages are a device's share of the
    model. With `f = i = w`, the case the table is made for, `D > 2` and `M >= D + 2`, the bubble is
    `(3 D - 7) f` if 2 divides `D`, else `(3 D - 4) f`.

    Source: Qi et al., "Pipeline Parallelism with Controllable Memory", 2024, V-Half; offsets of the
    block from the authors' scheduler. This package fills its ends in its own way.

    Args:
        num_devices: `D`, at least 1; the schedule has `2 D` stages.
        num_microbatches: `M`, at least 1.

    Returns:
        The validated schedule.

    Example:
        >>> print(v_half(2, 2))
        0: 0F0 0F1 3F0 3I0 3F1 3I1 0I0 3W0 0I1 3W1 0W0 0W1
        1: 1F0 2F0 1F1 2F1 2I0 1I0 2I1 1I1 2W0 1W0 2W1 1W1
    """
    # Without a gap, forwards and input gradients would meet if 2 divides D.
    gap = 0 if num_devices % 2 else 3
    devices = range(num_devices)
    offsets = [
        *(2 * d for d in devices),
        *(2 * num_devices - 1 + d for d in devices),
        *(3 * num_devices + gap - 1 + 2 * d for d in devices),
        *(5 * num_devices + gap - 1 + d for d in devices),
    ]
    return _shortest(offsets, num_microbatches, 2 * (num_devices // 2 + 1))


def _shortest(offsets: Sequence[int], num_microbatches: int, limit: int) -> Schedule:
    """Returns the shortest of the ways to fill the ends, which depends on `M` and `D`."""
    num_devices = len(offsets) // 4
    # Two stages a device, each with a forward, an input gradient and a weight gradient.
    period, limits = 6, [limit] * num_devices
    schedules = repeated(vee(num_devices), offsets, period, num_microbatches, limits)
    return min(schedules, key=lambda schedule: simulate(schedule).makespan)


_ALL: dict[str, Callable[..., Schedule]] = {name: globals()[name] for name in NAMES}
BUILDERS = {name: builder for name, builder in _ALL.items() if NAMES[name].num_slices == 1}
"""Every published schedule of whole sequences by its name; it runs any stages."""
SLICED = {name: builder for name, builder in _ALL.items() if name not in BUILDERS}
"""Schedules that cut sequences into slices, which only some stages take."""


def build(
    name: str, num_devices: int, num_microbatches: int, num_virtual_stages: int | None = None
) -> Schedule:
    """Builds a published schedule by name.

    Args:
        name: as in `pipemesh.schedule.names`, for example `1f1b`, `interleaved:2` or
            `seq1f1b:4`, where the number is that of slices.
        num_devices: at least 1.
        num_microbatches: at least 1.
        num_virtual_stages: stages a device; by default the number in the name, or else the
            default of the builder.

    Returns:
        The validated schedule.

    Raises:
        ScheduleError: the name is unknown (suggests the nearest), a count is bad, the schedule
            fixes another number of virtual stages, or the name says another one.

    Example:
        >>> build("zb_h1", 4, 8).num_devices
        4
    """
    parsed = parse(name)
    if parsed.name not in NAMES:
        raise ScheduleError(
            f"schedule {name!r} is not built from counts alone; "
            + ("use ScheduleSpec.from_text" if parsed.name == FILE else "use list_schedule(costs)")
        )
    function, known = _ALL[parsed.name], NAMES[parsed.name]
    number = agreed_stages(name, parsed, num_virtual_stages)
    if number is not None and not known.is_open and number != known.stages_a_device:
        raise ScheduleError(
            f"num_virtual_stages is {number}, but {parsed.name} always has "
            f"{known.stages_a_device} a device; leave it out"
        )
    if parsed.name in SLICED:
        return function(num_devices, num_microbatches, parsed.slices())
    if known.is_open and number is not None:
        return function(num_devices, num_microbatches, number)
    return function(num_devices, num_microbatches)
