"""Bytes that a stage holds: weights, optimizer state and activations of microbatches in flight.

How many microbatches are in flight depends on the schedule. Formulas cover the schedules named
here, at any size and without a table. `pipemesh.schedule.simulate(table).for_partition()` counts
the same for any table, action by action.
"""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

from pipemesh.errors import PartitionError
from pipemesh.partition.costs import (
    SUM_LIMIT,
    Ints,
    Stack,
    decimal,
    prefix_sums,
    to_big_integers,
    to_integers,
    whole,
)

REMAT_POLICIES = ("none", "full", "except_last")

WITH_FORMULA = (
    "gpipe",
    "one_f_one_b",
    "interleaved_one_f_one_b",
    "looped_bfs",
    "zb_h1",
)
"""Names of the schedules that have a formula, as in `pipemesh.schedule`."""

_FORWARD_FIRST = ("gpipe", "looped_bfs")


def in_flight(
    schedule: str, num_microbatches: int, num_stages: int, num_virtual_stages: int = 1
) -> tuple[int, ...]:
    """Counts the microbatches whose activations each stage holds at its peak.

    * `gpipe` and `looped_bfs` run all forward passes first: every stage holds all M.
    * `one_f_one_b`: stage s of S holds min(M, S - s).
    * `zb_h1` moves weight gradients into the bubble, which keeps activations longer on late
      stages, until all stages hold as many as the first one: min(M, S).
    * `interleaved_one_f_one_b` on D devices with V stages each: device d runs
      min(M V, 2 (D - d - 1) + (V - 1) D + 1) forward actions ahead of its first backward action;
      each stage's own peak is counted by walking through the device's actions.

    Args:
        schedule: one of `WITH_FORMULA`.
        num_microbatches: M, one or more.
        num_stages: S, all stages, so D = S / V devices.
        num_virtual_stages: V, the stages of each device.

    Returns:
        For each stage, the number of microbatches.

    Raises:
        PartitionError: a number is not whole or below 1, the schedule has no formula, or it does
            not allow several virtual stages.

    Example:
        >>> in_flight("one_f_one_b", num_microbatches=3, num_stages=4)
        (3, 3, 2, 1)
    """
    stages = whole("num_stages", num_stages, 1)
    microbatches = whole("num_microbatches", num_microbatches, 1)
    whole("num_virtual_stages", num_virtual_stages, 1)
    if schedule not in WITH_FORMULA:
        raise PartitionError(
            f"schedule is {schedule!r}, but must be one of {', '.join(WITH_FORMULA)}"
        )
    if num_virtual_stages > 1 and schedule in ("one_f_one_b", "zb_h1"):
        raise PartitionError(
            f"schedule {schedule!r} runs one stage on each device, but num_virtual_stages is "
            f"{num_virtual_stages}; use schedule 'interleaved_one_f_one_b' or 'looped_bfs', or "
            "num_virtual_stages=1"
        )
    if schedule in _FORWARD_FIRST:
        return (microbatches,) * stages
    if schedule == "zb_h1":
        return (min(microbatches, stages),) * stages
    if num_virtual_stages == 1:
        return tuple(min(microbatches, stages - stage) for stage in range(stages))
    devices = stages // num_virtual_stages
    counts = [0] * stages
    for device in range(devices):
        peaks = _interleaved_peaks(device, devices, num_virtual_stages, microbatches)
        for round_, peak in enumerate(peaks):
            counts[round_ * devices + device] = peak
    return tuple(counts)


def _interleaved_peaks(device: int, devices: int, rounds: int, microbatches: int) -> list[int]:
    """Returns the peak of each stage of one device by walking through its actions."""
    # Groups of as many microbatches as devices go through all rounds before the next group.
    forward = [
        round_
        for begin in range(0, microbatches, devices)
        for round_ in range(rounds)
        for _ in range(min(devices, microbatches - begin))
    ]
    backward = [rounds - 1 - round_ for round_ in forward]
    warm_up = min(len(forward), 2 * (devices - device - 1) + (rounds - 1) * devices + 1)
    held, peaks = [0] * rounds, [0] * rounds
    for action, round_ in enumerate(forward):
        held[round_] += 1
        peaks[round_] = max(peaks[round_], held[round_])
        if action + 1 >= warm_up:
            held[backward[action + 1 - warm_up]] -= 1
    return peaks


def at_once(
    schedule: str, num_microbatches: int | None, num_stages: int, num_virtual_stages: int = 1
) -> tuple[Fraction, ...]:
    """Returns for each stage the share of microbatches that turn around at once."""
    # Their backward pass follows their forward pass. Where all forward passes come first, that is
    # the last microbatch in the last stage of every device; elsewhere every microbatch in the last
    # stage of all. A single microbatch turns around wherever nothing else is between. An unknown
    # number of microbatches counts as large.
    last = (
        num_stages // num_virtual_stages
        if schedule in _FORWARD_FIRST or num_microbatches == 1
        else 1
    )
    share = Fraction(1)
    if schedule in _FORWARD_FIRST:
        share = Fraction(0) if num_microbatches is None else Fraction(1, num_microbatches)
    return (Fraction(0),) * (num_stages - last) + (share,) * last


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of a stage as integers, from prefix sums over the allowed boundaries.

    Stage s with the layers between the boundaries i and j holds
    `parameters[j] - parameters[i]
    + activation_weight[s] * (activations[j] - activations[i] + shared[i])
    + entry_weight[s] * entry[i]` units.
    """

    parameters: Ints  # Prefix sums of parameter and optimizer bytes.
    activations: Ints  # Prefix sums of activations of one microbatch, each tensor once.
    shared: Ints  # At a boundary, activations that the layers on both sides keep.
    entry: Ints  # At a boundary, the input of the stage behind it, where inputs are kept.
    activation_weight: tuple[int, ...]  # For each stage, the sets of activations that it holds.
    entry_weight: tuple[int, ...]  # For each stage, the inputs that it holds.
    unit: Fraction  # Bytes of a unit.
    limit: int | None  # Most units of a device.

    @property
    def keeps_inputs(self) -> bool:
        """True if a shorter stage can need more memory, so that greedy cuts prove nothing."""
        return any(self.entry_weight) or bool(self.shared.any())

    def units(self, stage: int, begin: Ints | int, end: Ints | int) -> Ints:
        """Returns the units that a stage holds; arrays of boundaries broadcast."""
        weight = self.activation_weight[stage]
        held = self.parameters[end] - self.parameters[begin]
        kept = self.activations[end] - self.activations[begin] + self.shared[begin]
        held = held + weight * kept
        if self.entry_weight[stage]:
            held = held + self.entry_weight[stage] * self.entry[begin]
        return held

    def last_end(self, stage: int, begin: Ints) -> Ints:
        """Returns the last boundary at which a stage may end; before `begin` if there is none."""
        assert self.limit is not None
        weight = self.activation_weight[stage]
        held = self.parameters + weight * self.activations
        most = held[begin] + self.limit - weight * self.shared[begin]
        if self.entry_weight[stage]:
            most = most - self.entry_weight[stage] * self.entry[begin]
        return np.searchsorted(held, most, side="right") - 1


def memory_model(
    stack: Stack,
    positions: Ints,
    *,
    limit: float | None,
    optimizer_bytes_per_parameter_byte: float,
    microbatches_in_flight: tuple[int, ...],
    remat: str,
    exact: bool,
) -> MemoryModel:
    """Builds the memory model of a stack over the boundaries at `positions`."""
    # With `exact`, numbers that fit no `int64` become Python integers. Without, they are rounded up
    # to a grid of 2^-50 of the largest stage.
    layers = stack.num_layers
    factor = 1 + decimal(optimizer_bytes_per_parameter_byte)
    columns = np.concatenate(
        [stack.parameter_bytes, stack.activation_bytes, stack.boundary_bytes, stack.shared_bytes]
    )
    most = max(microbatches_in_flight)
    total = float(factor) * columns[:layers].sum() + (most + 1) * columns[layers:].sum()
    integers_and_unit = to_integers(columns)
    if integers_and_unit is None and exact:
        integers_and_unit = to_big_integers(columns)
    if integers_and_unit is not None and not exact:
        # Bytes times the numerator of the factor must fit an int64.
        if total / float(integers_and_unit[1]) * factor.denominator >= SUM_LIMIT:
            integers_and_unit = None
    if integers_and_unit is None:
        unit = Fraction(2) ** (int(np.ceil(np.log2(max(total, 1e-300)))) - 50)
        parameters = np.ceil(columns[:layers] * float(factor) / float(unit)).astype(np.int64)
        others = np.ceil(columns[layers:] / float(unit)).astype(np.int64)
        # The difference of the two counts, so it must be rounded up too.
        others[:layers] += others[2 * layers :] > 0
    else:
        integers, unit = integers_and_unit
        if exact:
            integers = integers.astype(object)
        parameters = integers[:layers] * factor.numerator
        others = integers[layers:] * factor.denominator
        unit = unit / factor.denominator
    kept, output, shared = others[:layers], others[layers : 2 * layers], others[2 * layers :]
    keeps_all = remat == "none"
    entry = np.zeros(layers + 1, dtype=others.dtype)
    if not keeps_all:
        # The input at boundary i is the output of layer i - 1. The input of the whole stack belongs
        # to the input pipeline, and the last output to the loss.
        entry[1:layers] = output[:-1]
    most_units = None
    if limit is not None:
        # A limit beyond every sum is no limit, and must not overflow when a sum is added to it.
        units = int(decimal(limit) // unit)
        most_units = units if exact else min(units, SUM_LIMIT)
    entry_weight = tuple(held if entry.any() else 0 for held in microbatches_in_flight)
    return MemoryModel(
        parameters=prefix_sums(parameters)[positions],
        activations=prefix_sums(kept - shared)[positions],
        shared=np.append(shared, shared[:1] * 0)[positions],
        entry=entry[positions],
        activation_weight=tuple(held if keeps_all else 1 for held in microbatches_in_flight),
        entry_weight=entry_weight,
        unit=unit,
        limit=most_units,
    )
