"""How many bytes a stage holds, from the microbatches in flight and the remat policy."""

from __future__ import annotations

import dataclasses
from fractions import Fraction

import numpy as np

from pipemesh.partition.costs import Stack
from pipemesh.partition.integers import (
    ROOM,
    Ints,
    decimal,
    prefix_sums,
    to_big_integers,
    to_integers,
)

REMAT_POLICIES = ("none", "full", "except_last")


@dataclasses.dataclass(frozen=True, eq=False)
class MemoryModel:
    """Bytes of a stage as integers, from prefix sums over the allowed boundaries.

    Stage s with the layers between the boundaries i and j holds
    `parameters[j] - parameters[i]
    + activation_weight[s] * (activations[j] - activations[i] + shared[i])
    + entry_weight[s] * entry[i]` units.

    Attributes:
        parameters: prefix sums of parameter and optimizer bytes.
        activations: prefix sums of activation bytes of one microbatch, each tensor once.
        shared: bytes that the layer before a boundary keeps for one microbatch as well as the layer
            after it, which a stage that begins there keeps alone.
        entry: bytes that enter at a boundary for one microbatch, where inputs of stages are kept.
        activation_weight: for each stage, how many sets of activations it holds.
        entry_weight: for each stage, how many stage inputs it holds.
        unit: bytes of one unit.
        limit: the most units that a device may hold, or `None`.
    """

    parameters: Ints
    activations: Ints
    shared: Ints
    entry: Ints
    activation_weight: tuple[int, ...]
    entry_weight: tuple[int, ...]
    unit: Fraction
    limit: int | None

    @property
    def keeps_inputs(self) -> bool:
        """Whether a later start can need more memory, so that greedy cuts are not enough."""
        return any(self.entry_weight) or bool(self.shared.any())

    def units(self, stage: int, begin: Ints | int, end: Ints | int) -> Ints:
        """Units that a stage holds; arrays broadcast.

        Args:
            stage: index of the stage.
            begin: boundaries where it begins.
            end: boundaries where it ends.

        Returns:
            Units of memory.
        """
        weight = self.activation_weight[stage]
        held = self.parameters[end] - self.parameters[begin]
        kept = self.activations[end] - self.activations[begin] + self.shared[begin]
        held = held + weight * kept
        if self.entry_weight[stage]:
            held = held + self.entry_weight[stage] * self.entry[begin]
        return held

    def last_end(self, stage: int, begin: Ints) -> Ints:
        """The last boundary at which a stage may end, less than `begin` if there is none.

        Args:
            stage: index of the stage.
            begin: boundaries where it begins.

        Returns:
            Boundaries.
        """
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
    flights: tuple[int, ...],
    remat: str,
    exact: bool,
) -> MemoryModel:
    """Builds the memory model of a stack.

    Args:
        stack: the costs.
        positions: the layer index of every allowed boundary.
        limit: bytes of a device, or `None`.
        optimizer_bytes_per_parameter_byte: bytes kept beside each byte of parameters.
        flights: microbatches in flight on each stage.
        remat: one of `REMAT_POLICIES`.
        exact: whether numbers that fit no `int64` become Python integers; otherwise they are
            rounded up to a grid of 2^-50 of the largest stage.

    Returns:
        The model.
    """
    layers = stack.num_layers
    factor = 1 + decimal(optimizer_bytes_per_parameter_byte)
    columns = np.concatenate(
        [stack.parameter_bytes, stack.activation_bytes, stack.boundary_bytes, stack.shared_bytes]
    )
    most = max(flights)
    total = float(factor) * columns[:layers].sum() + (most + 1) * columns[layers:].sum()
    found = to_integers(columns)
    if found is None and exact:
        found = to_big_integers(columns)
    if found is not None and not exact:
        # Bytes times the numerator of the factor must leave room in an int64.
        if total / float(found[1]) * factor.denominator >= ROOM:
            found = None
    if found is None:
        unit = Fraction(2) ** (int(np.ceil(np.log2(max(total, 1e-300)))) - 50)
        parameters = np.ceil(columns[:layers] * float(factor) / float(unit)).astype(np.int64)
        others = np.ceil(columns[layers:] / float(unit)).astype(np.int64)
        # What counts is the difference, which must be rounded up as well.
        others[:layers] += others[2 * layers :] > 0
    else:
        integers, unit = found
        if exact:
            integers = integers.astype(object)
        parameters = integers[:layers] * factor.numerator
        others = integers[layers:] * factor.denominator
        unit = unit / factor.denominator
    kept, output, shared = others[:layers], others[layers : 2 * layers], others[2 * layers :]
    keeps_all = remat == "none"
    entry = np.zeros(layers + 1, dtype=others.dtype)
    if not keeps_all:
        # What enters at boundary i is the output of layer i - 1; the input of the whole stack
        # belongs to the input pipeline, and the last output to the loss.
        entry[1:layers] = output[:-1]
    enters = flights if entry.any() else (0,) * len(flights)
    return MemoryModel(
        parameters=prefix_sums(parameters)[positions],
        activations=prefix_sums(kept - shared)[positions],
        shared=np.append(shared, shared[:1] * 0)[positions],
        entry=entry[positions],
        activation_weight=tuple(flight if keeps_all else 1 for flight in flights),
        entry_weight=enters,
        unit=unit,
        limit=None if limit is None else _whole_units(limit, unit, exact),
    )


def _whole_units(limit: float, unit: Fraction, exact: bool) -> int:
    units = int(decimal(limit) // unit)
    # A limit beyond every sum is no limit, and must not overflow when added to one.
    return units if exact else min(units, ROOM)
