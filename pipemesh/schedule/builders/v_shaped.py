"""Zero bubble on a V: stages go down the devices and come back, two a device."""

from __future__ import annotations

from collections import deque

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_counts
from pipemesh.schedule.placement import vee
from pipemesh.schedule.schedule import Schedule
from pipemesh.schedule.validate import validate


class _Row:
    """One device's row under construction: counts what each of its two stages has done.

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

    def left(self, stage: int, kind: str) -> int:
        """How many forwards (`F`) or backwards (`B`, whole or split) a stage has still to do."""
        return self._num_microbatches - self._next[stage, kind]

    def forward(self, stage: int) -> None:
        """The next forward of a stage."""
        if self.left(stage, "F"):
            self.actions.append(Action(stage, "F", self._next[stage, "F"]))
            self._next[stage, "F"] += 1

    def backward(self, stage: int) -> None:
        """The next full backward of a stage."""
        if self.left(stage, "B"):
            self.actions.append(Action(stage, "B", self._next[stage, "B"]))
            self._next[stage, "B"] += 1

    def input_grad(self, stage: int) -> None:
        """The next input gradient of a stage; its weight gradient is owed from now on."""
        if self.left(stage, "B"):
            self.actions.append(Action(stage, "I", self._next[stage, "B"]))
            self._owed.append(Action(stage, "W", self._next[stage, "B"]))
            self._next[stage, "B"] += 1

    def weight_grad(self, stage: int | None = None) -> None:
        """The oldest weight gradient that is owed, of one stage or of either."""
        for action in self._owed:
            if stage in (None, action.stage):
                self._owed.remove(action)
                self.actions.append(action)
                return

    def all_weight_grads(self) -> None:
        """All weight gradients that are still owed, oldest first."""
        while self._owed:
            self.weight_grad()


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

    Raises:
        ScheduleError: a count is below 1.

    Example:
        >>> zb_v(2, 4).stage_devices
        (0, 1, 1, 0)
    """
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        row = _Row(device, num_devices, num_microbatches)
        to_turn = num_devices - device
        for _ in range(2 * to_turn - 1):
            row.forward(row.down)
        for _ in range(device):
            row.forward(row.up)
            row.forward(row.down)
        for _ in range(to_turn):
            row.forward(row.up)
            row.input_grad(row.up)
            row.weight_grad(row.up)
        while row.left(row.up, "F"):
            row.forward(row.down)
            row.input_grad(row.down)
            row.weight_grad(row.down)
            row.forward(row.up)
            row.input_grad(row.up)
            row.weight_grad(row.up)
        for _ in range(device):
            row.input_grad(row.down)
            row.input_grad(row.up)
        for _ in range(to_turn):
            row.input_grad(row.down)
            row.weight_grad(row.down)
        for _ in range(num_microbatches):
            row.weight_grad(row.up)
        row.all_weight_grads()
        rows.append(tuple(row.actions))
    return validate(Schedule(tuple(rows), vee(num_devices), num_microbatches))


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
    num_devices, num_microbatches = check_counts(
        num_devices=num_devices, num_microbatches=num_microbatches
    )
    if num_microbatches < 2 * num_devices:
        raise ScheduleError(
            f"num_microbatches is {num_microbatches}, but DualPipeV needs at least twice "
            f"num_devices, {2 * num_devices}; use more microbatches, or zb_v"
        )
    rows: list[tuple[Action, ...]] = []
    for device in range(num_devices):
        row = _Row(device, num_devices, num_microbatches)
        after, upto = num_devices - device - 1, device + 1
        for _ in range(2 * after):
            row.forward(row.down)
        for _ in range(upto):
            row.forward(row.down)
            row.forward(row.up)
        for _ in range(after):
            row.input_grad(row.up)
            row.weight_grad(row.up)
            row.forward(row.up)
        for _ in range(num_microbatches - 2 * num_devices + upto):
            row.forward(row.down)
            row.backward(row.up)
            row.forward(row.up)
            row.backward(row.down)
        for _ in range(after):
            row.backward(row.up)
            row.forward(row.up)
            row.backward(row.down)
        # The first half of these backwards stays whole, the second half leaves its weight
        # gradients for the gaps of the drain.
        for index in range(2 * upto):
            stage = row.down if index % 2 else row.up
            (row.backward if index < upto else row.input_grad)(stage)
        for _ in range(after):
            row.weight_grad()
            row.input_grad(row.down)
        row.all_weight_grads()
        rows.append(tuple(row.actions))
    return validate(Schedule(tuple(rows), vee(num_devices), num_microbatches))
