"""A checked schedule as integers, for the simulator.

Every `(kind, stage, piece)` has a number, its *code*, so that the end of an action is a list access
instead of a hash of an object. A piece is a microbatch or a slice of one. With `S` stages and `P`
pieces the code of an action is `(kind_index * S + stage) * P + piece`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pipemesh.errors import ScheduleError
from pipemesh.schedule.action import EFFECTS, KINDS, Action, makers
from pipemesh.schedule.checks import check_type
from pipemesh.schedule.schedule import Schedule

NOTHING = -1
"""The code of no action: the action waits for no other stage."""

_, BACKWARD, INPUT_GRAD, WEIGHT_GRAD, _ = range(len(KINDS))
# Pairs of kinds, by their index, of which the first makes what the second takes on its own stage.
_IN_ORDER = tuple(
    (KINDS.index(maker), KINDS.index(kind))
    for maker in KINDS
    for kind in KINDS
    for name in {v.name for r in (False, True) for v in EFFECTS[kind].taken(r) if not v.step}
    if maker in makers(name)
)
# For each kind the distance to the neighbouring stage that it waits for, and the kinds that make
# what it takes from there, by their index.
_FROM_NEIGHBOUR = tuple(
    (0, ()) if value is None else (value.step, tuple(map(KINDS.index, makers(value.name))))
    for value in (EFFECTS[kind].neighbour for kind in KINDS)
)


@dataclasses.dataclass(frozen=True)
class Table:
    """A schedule that is complete and in which every row is in order by itself."""

    codes: list[list[int]]  # For each device the code of each action.
    # The code of the neighbouring stage's action that it consumes, or `NOTHING`.
    waits: list[list[int]]
    remote: list[list[bool]]  # That neighbour is on another device.
    num_codes: int


def compile_table(schedule: Schedule) -> Table:
    """Checks everything that can be checked without looking at two rows at once; see `validate`."""
    if not check_type("schedule", schedule, Schedule).stage_devices:
        raise ScheduleError("the schedule has no stages; it must have at least 1")
    _check_size(schedule)
    ticks, codes = _place(schedule)
    _check_complete(schedule, ticks)
    _check_order(schedule, ticks)
    waits, remote = _neighbours(schedule, ticks, codes)
    return Table(codes, waits, remote, len(ticks))


def _check_size(schedule: Schedule) -> None:
    """Rejects a schedule with too few actions before anything is as large as its counts."""
    # One typo, such as 0F999999999, must not ask for gigabytes.
    if sum(map(len, schedule.rows)) >= schedule.num_stages * schedule.num_pieces:
        return
    done: list[set[int]] = [set() for _ in schedule.stage_devices]
    for row in schedule.rows:
        for action in row:
            if action.kind == "F" and action.stage < schedule.num_stages:
                done[action.stage].add(schedule.piece(action))
    for stage, pieces in enumerate(done):
        for piece in range(schedule.num_pieces):
            if piece not in pieces:
                raise _missing(schedule, _action(schedule, "F", stage, piece))


def _action(schedule: Schedule, kind: str, stage: int, piece: int) -> Action:
    microbatch, part = divmod(piece, schedule.num_slices)
    return Action(stage, kind, microbatch, part if schedule.num_slices > 1 else None)


def _place(schedule: Schedule) -> tuple[list[int], list[list[int]]]:
    """Returns the tick of every code (or `NOTHING`) and the codes of every row."""
    num_stages, num_microbatches = schedule.num_stages, schedule.num_microbatches
    num_slices, num_pieces = schedule.num_slices, schedule.num_pieces
    block = num_stages * num_pieces
    kind_base = {kind: index * block for index, kind in enumerate(KINDS)}
    ticks = [NOTHING] * (len(KINDS) * block)
    rows: list[list[int]] = []
    for device, row in enumerate(schedule.rows):
        row_codes: list[int] = []
        for tick, action in enumerate(row):
            stage, microbatch = action.stage, action.microbatch
            if stage >= num_stages or microbatch >= num_microbatches:
                raise cell_error(
                    schedule,
                    device,
                    tick,
                    f"lies outside {num_stages} stages and {num_microbatches} microbatches",
                )
            part = action.slice or 0
            if (action.slice is None) != (num_slices == 1) or part >= num_slices:
                allowed = f"{num_slices} slices" if num_slices > 1 else "whole sequences"
                raise cell_error(schedule, device, tick, f"does not fit a schedule of {allowed}")
            home = schedule.stage_devices[stage]
            if home != device:
                raise cell_error(
                    schedule, device, tick, f"runs here, but stage {stage} is on device {home}"
                )
            code = kind_base[action.kind] + stage * num_pieces + microbatch * num_slices + part
            if ticks[code] != NOTHING:
                raise cell_error(
                    schedule, device, tick, f"was already done on this device at tick {ticks[code]}"
                )
            ticks[code] = tick
            row_codes.append(code)
        rows.append(row_codes)
    return ticks, rows


def _check_complete(schedule: Schedule, ticks: list[int]) -> None:
    block = schedule.num_stages * schedule.num_pieces
    forward_only = schedule.is_forward_only
    is_done = [tick != NOTHING for tick in ticks]
    kinds = (is_done[kind * block : (kind + 1) * block] for kind in range(len(KINDS)))
    for unit, (forward, full, input_grad, weight_grad, _) in enumerate(zip(*kinds, strict=True)):
        is_twice = full and (input_grad or weight_grad)
        if forward and not is_twice and (forward_only or full or (input_grad and weight_grad)):
            continue
        stage, piece = divmod(unit, schedule.num_pieces)
        if forward and is_twice:
            other = "I" if input_grad else "W"
            tick = ticks[(INPUT_GRAD if input_grad else WEIGHT_GRAD) * block + unit]
            raise cell_error(
                schedule,
                schedule.stage_devices[stage],
                tick,
                f"is part of {_action(schedule, 'B', stage, piece)}, which this device does too; "
                f"keep either the B or the I and the W, so drop this {other} or that B",
            )
        kind = "F" if not forward else "W" if input_grad else "I" if weight_grad else "B"
        raise _missing(schedule, _action(schedule, kind, stage, piece))


def _missing(schedule: Schedule, action: Action) -> ScheduleError:
    """Returns the error for an action that a device never does, near a related action."""
    device = schedule.stage_devices[action.stage]
    row = schedule.rows[device]
    relatives = [tick for tick, other in enumerate(row) if other.also("F") == action.also("F")]
    # Without a relative, point to the neighbour microbatch of the same kind, else to the end.
    near = relatives or [
        tick
        for tick, other in enumerate(row)
        if (other.stage, other.kind) == (action.stage, action.kind)
        and abs(schedule.piece(other) - schedule.piece(action)) == 1
    ]
    tick = near[-1] if near else len(row)
    hint = ""
    if action.kind == "B":
        hint = f" or its I and W ({action.also('I')}, {action.also('W')})"
    beside = f"next to {row[tick]}" if tick < len(row) else "at the end of the row"
    return ScheduleError(
        f"device {device} never does {action}{hint}; it belongs near tick {tick}, {beside}\n"
        + excerpt(schedule, device, tick)
    )


def _check_order(schedule: Schedule, ticks: list[int]) -> None:
    """Checks the order of actions within each device."""
    block = schedule.num_stages * schedule.num_pieces
    for first, second in _IN_ORDER:
        of_both = (ticks[kind * block : (kind + 1) * block] for kind in (first, second))
        for unit, (early, late) in enumerate(zip(*of_both, strict=True)):
            if NOTHING < late < early:
                raise _too_early(schedule, unit, early, late)
    for unit in range(block if schedule.num_slices > 1 else 0):
        if unit % schedule.num_slices:
            before = unit - 1
            # The gradient of the keys and values of a slice comes from the slices after it.
            later = max(ticks[BACKWARD * block + unit], ticks[INPUT_GRAD * block + unit])
            pairs = [(ticks[before], ticks[unit])]
            pairs += [(later, ticks[kind * block + before]) for kind in (BACKWARD, INPUT_GRAD)]
            for early, late in pairs:
                if NOTHING < late < early:
                    raise _too_early(schedule, unit, early, late)
    if schedule.is_forward_only:
        for row in schedule.rows:
            for action in row:
                if action.kind == "R":
                    raise _missing(schedule, action.also("B"))


def _too_early(schedule: Schedule, unit: int, early: int, late: int) -> ScheduleError:
    """Returns the error for an action at tick `late` that needs the one at tick `early`."""
    device = schedule.stage_devices[unit // schedule.num_pieces]
    needed = schedule.rows[device][early]
    reason = f"comes before {needed} (tick {early}), whose result it needs"
    return cell_error(schedule, device, late, reason)


def _neighbours(
    schedule: Schedule, ticks: list[int], codes: list[list[int]]
) -> tuple[list[list[int]], list[list[bool]]]:
    num_stages, num_pieces = schedule.num_stages, schedule.num_pieces
    block = num_stages * num_pieces
    homes = schedule.stage_devices
    waits: list[list[int]] = []
    remote: list[list[bool]] = []
    for device, row in enumerate(codes):
        row_waits: list[int] = []
        row_remote: list[bool] = []
        for tick, code in enumerate(row):
            kind, unit = divmod(code, block)
            stage = unit // num_pieces
            source, far = NOTHING, False
            step, kinds = _FROM_NEIGHBOUR[kind]
            if step and 0 <= stage + step < num_stages:
                neighbour = unit + step * num_pieces
                for maker in kinds:
                    if ticks[maker * block + neighbour] != NOTHING:
                        source = maker * block + neighbour
                far = homes[stage + step] != device
            if source != NOTHING and not far and ticks[source] > tick:
                raise _too_early(schedule, unit, ticks[source], tick)
            row_waits.append(source)
            row_remote.append(far)
        waits.append(row_waits)
        remote.append(row_remote)
    return waits, remote


def deadlock_error(schedule: Schedule, table: Table, position: Iterable[int]) -> ScheduleError:
    """Returns the error for rows that wait for each other at the ticks `position`."""
    ticks = list(position)
    block = schedule.num_stages * schedule.num_pieces

    def waited_for(device: int) -> Action:
        kind, unit = divmod(table.waits[device][ticks[device]], block)
        stage, piece = divmod(unit, schedule.num_pieces)
        return _action(schedule, KINDS[kind], stage, piece)

    # Every waiting device waits for another waiting device, so walking on ends in a circle.
    device = next(d for d, row in enumerate(table.codes) if ticks[d] < len(row))
    path: list[int] = []
    while device not in path:
        path.append(device)
        device = schedule.stage_devices[waited_for(device).stage]
    circle = path[path.index(device) :]
    start = circle.index(min(circle))
    circle = circle[start:] + circle[:start]
    waits = [
        f"device {d}, tick {ticks[d]}: {schedule.rows[d][ticks[d]]} waits for {waited_for(d)}"
        for d in circle
    ]
    first = circle[0]
    return ScheduleError(
        "deadlock: " + "; ".join(waits) + "\n" + excerpt(schedule, first, ticks[first])
    )


def cell_error(schedule: Schedule, device: int, tick: int, reason: str) -> ScheduleError:
    """Returns an error about one cell: device, tick, action, the reason, and the rows around it."""
    action = schedule.rows[device][tick]
    return ScheduleError(
        f"device {device}, tick {tick}: {action} {reason}\n{excerpt(schedule, device, tick)}"
    )


# How many rows and ticks around a cell an error shows.
_ROWS_AROUND = 1
_TICKS_AROUND = 3


def excerpt(schedule: Schedule, device: int, tick: int) -> str:
    """Draws the rows and ticks around a cell, which may be one past the end of its row."""
    devices = range(
        max(0, device - _ROWS_AROUND), min(schedule.num_devices, device + _ROWS_AROUND + 1)
    )
    longest = max(len(schedule.rows[d]) for d in devices)
    ticks = range(
        max(0, tick - _TICKS_AROUND), max(min(longest, tick + _TICKS_AROUND + 1), tick + 1)
    )
    table = [["tick", *(f" {t} " for t in ticks)]]
    for d in devices:
        row = schedule.rows[d]
        cells = [str(row[t]) if t < len(row) else "." for t in ticks]
        table.append(
            [f"device {d}:"]
            + [
                f"[{cell}]" if (d, t) == (device, tick) else f" {cell} "
                for t, cell in zip(ticks, cells, strict=True)
            ]
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(table[0]))]
    lines = [
        "  "
        + f"{line[0]:<{widths[0]}} "
        + " ".join(f"{cell:^{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
        for line in table
    ]
    return "\n".join(line.rstrip() for line in lines)
