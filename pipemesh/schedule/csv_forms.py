"""Schedules as CSV for other libraries; `pipemesh.schedule.from_csv` reads all of these forms.

* `compute_only`: one line a device, one action a cell. `torch.distributed.pipelining` loads it
  and works out sends and receives by itself. Recomputations are written as in text (`0R0`);
  PyTorch refuses them, and the other forms have no cells for them.
* `compute_comms`: the same with everything that `torch.distributed.pipelining` does besides, as
  its runtime's `_dump_csv` writes by default. `0SEND_F1` sends what `0F1` made, `1RECV_F1` receives
  it for `1F1`, `SEND_B` and `RECV_B` are for gradients. They are put where
  `pipemesh.schedule.communication` proves that they meet. After the last gradient of a stage,
  `0REDUCE_GRAD` divides the sum of its gradients by the number of microbatches. Cells that gather
  sharded weights (`UNSHARD`, `RESHARD`) are read but not written.
* `zero_bubble`: what the scheduler of the zero-bubble authors prints (`to_csv` in `zbv_greedy.py`
  of sail-sg/zero-bubble-pipeline-parallelism): one tick a cell, idle ones empty, with the legs of
  a microbatch's way as letters. `F`, `f` are the forward down and up the V, `B`, `b` the input
  gradient in the order it is done, so of the upper and the lower stage, and `W`, `w` their weight
  gradients. With one stage a device there are only capital letters. There are no whole backwards.

No form has cells for slices: PyTorch reads `0F0.1` as `0F0`. They are written as text
(`Schedule.to_text`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import Action
from pipemesh.schedule.checks import check_type
from pipemesh.schedule.communication import Receive, Send, Step, insert_transfers
from pipemesh.schedule.csv_format import LEGS, check_cells, leg_stages
from pipemesh.schedule.names import check_name
from pipemesh.schedule.placement import loop, vee
from pipemesh.schedule.schedule import Schedule, to_csv
from pipemesh.schedule.simulate import lockstep

CSV_FORMS = ("compute_only", "compute_comms", "zero_bubble")
"""The names of the forms."""


def write_csv(schedule: Schedule, form: str = "compute_only") -> str:
    """Writes a schedule in one of the forms of this module.

    Args:
        schedule: any valid schedule; for `zero_bubble` on a V, or with one stage a device, and
            with split backwards.
        form: one of `CSV_FORMS`.

    Returns:
        The content of the file.

    Raises:
        ScheduleError: the form is unknown, the schedule is not valid, or the form cannot express
            it.

    Example:
        >>> from pipemesh.schedule import zb_h1
        >>> print(write_csv(zb_h1(2, 1), "compute_comms"), end="")
        0F0,0SEND_F0,0RECV_B0,0I0,0W0,0REDUCE_GRAD
        1RECV_F0,1F0,1I0,1SEND_B0,1W0,1REDUCE_GRAD
        >>> print(write_csv(zb_h1(2, 1), "zero_bubble"), end="")
        F0,,,B0,W0
        ,F0,B0,W0,
    """
    check_name("form of CSV", form, CSV_FORMS)
    if form == "compute_only":
        return to_csv(schedule)
    check_cells(check_type("schedule", schedule, Schedule).rows, form)
    if form == "compute_comms":
        return "".join(",".join(_with_sums(row)) + "\n" for row in insert_transfers(schedule))
    return _zero_bubble(schedule)


def _with_sums(steps: Sequence[Step]) -> Iterator[str]:
    """The cells of a row, with a `REDUCE_GRAD` after the last gradient of each stage."""
    last = {step.stage: step for step in steps if isinstance(step, Action) and step.kind in "BW"}
    complete: list[str] = []
    for step in steps:
        if isinstance(step, Action):
            # Not before the sends, for which another device waits.
            yield from complete
            complete = [f"{step.stage}REDUCE_GRAD"] if last.get(step.stage) == step else []
        yield _cell(step)
    yield from complete


def _cell(step: Step) -> str:
    if isinstance(step, Action):
        return str(step)
    action = step.action
    way = "F" if action.kind == "F" else "B"
    if isinstance(step, Send):
        return f"{action.stage}SEND_{way}{action.microbatch}"
    assert isinstance(step, Receive)
    stage = action.stage + (1 if way == "F" else -1)
    return f"{stage}RECV_{way}{action.microbatch}"


def _zero_bubble(schedule: Schedule) -> str:
    num_devices = schedule.num_devices
    if schedule.stage_devices not in (loop(num_devices), vee(num_devices)):
        raise ScheduleError(
            f"stages lie on devices {schedule.stage_devices}, but CSV of the form zero_bubble is "
            "for a V or for one stage a device; use compute_only"
        )
    lines: list[str] = []
    for device, row in enumerate(lockstep(schedule)):
        letters = {
            (kind, stage): letter
            for letter, (kind, stage) in leg_stages(device, num_devices, schedule.num_stages)
        }
        cells: list[str] = []
        for action in row:
            if action is not None and (action.kind, action.stage) not in letters:
                raise ScheduleError(
                    f"device {device}: {action} is a whole backward, and CSV of the form "
                    f"zero_bubble has only {LEGS}; split it, or use compute_only"
                )
            cells.append(
                f"{letters[action.kind, action.stage]}{action.microbatch}" if action else ""
            )
        lines.append(",".join(cells) + "\n")
    return "".join(lines)
