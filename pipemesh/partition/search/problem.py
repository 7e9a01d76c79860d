"""The partitioning problem in integers: which stages are allowed, and how long each takes."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import numpy as np

from pipemesh.partition.costs import Floats, Stack
from pipemesh.partition.integers import (
    ROOM,
    Ints,
    prefix_sums,
    to_big_integers,
    to_integers,
)
from pipemesh.partition.memory import MemoryModel

_CACHED_NUMBERS = 20_000_000


class ComputeTimes:
    """Prefix sums of the compute time of the layers, one array for each kind of stage.

    A kind is a device speed together with the share of forward passes that run twice.
    """

    def __init__(self, kinds: tuple[tuple[Fraction, Fraction], ...]) -> None:
        self.kinds = kinds
        self.unit = Fraction(1)
        self.dtype: Any = np.int64
        self.transfers: Ints | None = None
        self.rounded = False
        self._columns: list[Ints | Floats] = []
        self._factors: list[tuple[int, int]] = []
        self._shift = 0
        self._positions: Ints = np.zeros(0, dtype=np.int64)
        self._cache: dict[int, Ints] = {}

    def prefix(self, kind: int) -> Ints:
        """Compute time before each allowed boundary, in units.

        Args:
            kind: index of the kind of stage.

        Returns:
            Rising integers, zero first.
        """
        cached = self._cache.get(kind)
        if cached is not None:
            return cached
        if self._factors:
            forward, backward = self._factors[kind]
            sums = self._columns[0] * forward + self._columns[1] * backward
        else:
            # A power of two, so that scaling by it loses nothing but what falls below the unit.
            layers = np.ldexp(self._layer_times(kind), self._shift)
            sums = prefix_sums(np.rint(layers).astype(np.int64))[self._positions]
        if (len(self._cache) + 1) * sums.size <= _CACHED_NUMBERS:
            self._cache[kind] = sums
        return sums

    def as_objects(self) -> ComputeTimes:
        """The same times as Python integers, whose squares never overflow.

        Returns:
            New times of dtype `object`.
        """
        copy = ComputeTimes(self.kinds)
        copy.unit, copy.rounded, copy.dtype = self.unit, self.rounded, object
        if self.transfers is not None:
            copy.transfers = self.transfers.astype(object)
        for kind in range(len(self.kinds)):
            copy._cache[kind] = self.prefix(kind).astype(object)
        return copy

    def _layer_times(self, kind: int) -> Floats:
        speed, again = self.kinds[kind]
        return (self._columns[0] * (1 + float(again)) + self._columns[1]) / float(speed)

    @classmethod
    def build(
        cls,
        stack: Stack,
        positions: Ints,
        kinds: tuple[tuple[Fraction, Fraction], ...],
        bandwidth: Fraction | None,
        exact: bool,
    ) -> ComputeTimes:
        """Scales all times to integers of one unit.

        Args:
            stack: the costs.
            positions: the layer index of every allowed boundary.
            kinds: the speed and the share of forward passes run twice, for each kind of stage.
            bandwidth: bytes per unit of time, or `None` if transfers are free.
            exact: whether times that fit no `int64` become Python integers; otherwise they are
                rounded to a grid of 2^-59 of the whole.

        Returns:
            The times.
        """
        times = cls(kinds)
        times._positions = positions
        layers = stack.num_layers
        crossing = np.zeros(layers + 1)
        if bandwidth is not None:
            crossing[1:layers] = stack.boundary_bytes[: layers - 1]
        crossing = crossing[positions]
        costs = np.concatenate([stack.forward, stack.backward])
        compute, transfer = to_integers(costs), to_integers(crossing)
        if exact:
            compute = compute or to_big_integers(costs)
            transfer = transfer or to_big_integers(crossing)
        if (
            compute is None
            or transfer is None
            or not times._scale(compute, transfer, bandwidth, exact)
        ):
            times._round(stack, crossing, bandwidth)
        return times

    def _scale(
        self,
        compute: tuple[Ints, Fraction],
        transfer: tuple[Ints, Fraction],
        bandwidth: Fraction | None,
        exact: bool,
    ) -> bool:
        """Finds a unit of which all times are multiples; says whether that worked."""
        costs, compute_unit = compute
        crossing, transfer_unit = transfer
        factors: list[tuple[Fraction, Fraction]] = [
            (compute_unit * (1 + again) / speed, compute_unit / speed)
            for speed, again in self.kinds
        ]
        transfer_factor = transfer_unit / (bandwidth or Fraction(1))
        every = [number for pair in factors for number in pair]
        if bandwidth is not None:
            every.append(transfer_factor)
        unit = _common_unit(every, bits=10**9 if exact else 128)
        if unit is None:
            return False
        integers = [(int(a / unit), int(b / unit)) for a, b in factors]
        by_transfer = int(transfer_factor / unit) if bandwidth is not None else 0
        layers = costs.size // 2
        forward, backward = sum(costs[:layers].tolist()), sum(costs[layers:].tolist())
        largest = max(forward * a + backward * b for a, b in integers)
        largest += 4 * by_transfer * max(crossing.tolist(), default=0)
        # The factors too have to fit, even where all they multiply is zero.
        fits = max(largest, by_transfer, *(max(pair) for pair in integers)) < ROOM
        if not fits and not exact:
            return False
        self.dtype = np.int64 if fits else object
        self.unit, self._factors = unit, integers
        self._columns = [
            prefix_sums(costs[:layers].astype(self.dtype))[self._positions],
            prefix_sums(costs[layers:].astype(self.dtype))[self._positions],
        ]
        if bandwidth is not None:
            self.transfers = crossing.astype(self.dtype) * by_transfer
        return True

    def _round(self, stack: Stack, crossing: Floats, bandwidth: Fraction | None) -> None:
        self.rounded = True
        self._factors = []
        self._columns = [stack.forward, stack.backward]
        waits = crossing / float(bandwidth) if bandwidth is not None else None
        slowest = min(float(speed) for speed, _ in self.kinds)
        total = (2 * stack.forward.sum() + stack.backward.sum()) / slowest
        if waits is not None:
            total += 4 * float(waits.max(initial=0.0))
        self._shift = 59 - math.ceil(math.log2(total))
        self.unit = Fraction(2) ** -self._shift
        if waits is not None:
            self.transfers = np.rint(np.ldexp(waits, self._shift)).astype(np.int64)


def _common_unit(numbers: list[Fraction], bits: int) -> Fraction | None:
    """The largest number of which all are integer multiples, unless it takes too many bits."""
    denominator = 1
    for number in set(numbers):
        denominator = math.lcm(denominator, number.denominator)
        if denominator.bit_length() > bits:
            return None
    numerator = 0
    for number in set(numbers):
        numerator = math.gcd(numerator, int(number * denominator))
    return Fraction(max(numerator, 1), denominator)


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """Everything the solvers need; boundaries are indices into `positions`.

    Attributes:
        positions: layer index of each boundary that `same_stage` leaves, 0 and n included.
        num_stages: S.
        times: compute and transfer times.
        kind_of_stage: for each stage, its kind in `times`.
        overlapped: whether a stage takes the longer of compute and transfers, not their sum.
        memory: the memory model with a limit, or `None`.
        min_layers: least layers of a stage.
        max_layers: most layers of a stage, or `None`.
        barriers: boundaries that no stage may span, rising.
        pinned: for some boundary indices, where they must be.
        num_virtual_stages: V, the most stages of a device.
        stage_devices: for each stage its device.
    """

    positions: Ints
    num_stages: int
    times: ComputeTimes
    kind_of_stage: tuple[int, ...]
    overlapped: bool = False
    memory: MemoryModel | None = None
    min_layers: int = 1
    max_layers: int | None = None
    barriers: tuple[int, ...] = ()
    pinned: tuple[tuple[int, int], ...] = ()
    num_virtual_stages: int = 1
    stage_devices: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Index of the last boundary."""
        return int(self.positions.size) - 1

    @property
    def num_devices(self) -> int:
        """How many devices the stages run on."""
        return max(self.stage_devices) + 1

    @property
    def monotone(self) -> bool:
        """Whether every part of an allowed stage is allowed and takes no longer."""
        return (
            self.times.transfers is None
            and self.min_layers <= 1
            and not (self.memory is not None and self.memory.keeps_inputs)
        )

    @property
    def forever(self) -> int:
        """More units of time than any stage or device can take."""
        total = max(int(self.times.prefix(kind)[-1]) for kind in sorted(set(self.kind_of_stage)))
        if self.times.transfers is not None:
            total += 2 * int(self.times.transfers.max()) * self.num_virtual_stages
        return total + 1

    def tied(self, bottleneck: int) -> int:
        """The largest bottleneck that rounding may have made of an equal one.

        Args:
            bottleneck: in units.

        Returns:
            The same where times are exact; otherwise so much more that no cut of equal bottleneck
            is lost: half a unit for each layer, and the last bits of the float divisions.
        """
        if not self.times.rounded:
            return bottleneck
        return bottleneck + self.size + (bottleneck >> 45)

    def prefix(self, stage: int) -> Ints:
        """Compute time before each boundary on the device of a stage.

        Args:
            stage: index of the stage.

        Returns:
            Rising integers.
        """
        return self.times.prefix(self.kind_of_stage[stage])

    def windows(self) -> tuple[Ints, Ints]:
        """First and last place of each of the S + 1 boundaries, from counting alone.

        Returns:
            Two arrays of boundaries.
        """
        index: Ints = np.arange(self.num_stages + 1)
        first: Ints = index + 0
        last: Ints = self.size - self.num_stages + index
        last[0] = 0
        first[-1] = self.size
        for boundary, place in self.pinned:
            first[boundary] = max(first[boundary], place)
            last[boundary] = min(last[boundary], place)
        # Every stage takes a layer, so a pinned boundary moves its neighbours too.
        first = np.maximum.accumulate(first - index) + index
        last = np.minimum.accumulate((last - index)[::-1])[::-1] + index
        return first, last

    def first_end(self, begin: Ints) -> Ints:
        """The first boundary at which a stage may end.

        Args:
            begin: boundaries where it begins.

        Returns:
            Boundaries; `size + 1` where there is none.
        """
        if self.min_layers <= 1:
            return begin + 1
        least = self.positions[begin] + self.min_layers
        return np.searchsorted(self.positions, least, side="left")

    def last_end(self, stage: int, begin: Ints) -> Ints:
        """The last boundary at which a stage may end, time left aside.

        Args:
            stage: index of the stage.
            begin: boundaries where it begins.

        Returns:
            Boundaries; `begin` or less where there is none.
        """
        last = np.full(begin.shape, self.size, dtype=np.int64)
        if self.max_layers is not None:
            most = self.positions[begin] + self.max_layers
            last = np.minimum(last, np.searchsorted(self.positions, most, side="right") - 1)
        if self.barriers:
            walls = np.asarray((*self.barriers, self.size), dtype=np.int64)
            last = np.minimum(last, walls[np.searchsorted(walls[:-1], begin, side="right")])
        if self.memory is not None:
            last = np.minimum(last, self.memory.last_end(stage, begin))
        return last

    def stage_times(self, stage: int, begin: Ints, end: Ints) -> Ints:
        """Time of a stage, transfers included; arrays broadcast.

        A device sends and receives the activation of one boundary and the gradient of the
        other, both directions at once, so both boundaries count once. Nothing is sent where the
        neighbouring stage is on the same device.

        Args:
            stage: index of the stage.
            begin: boundaries where it begins.
            end: boundaries where it ends.

        Returns:
            Units of time.
        """
        prefix = self.prefix(stage)
        compute = prefix[end] - prefix[begin]
        if self.times.transfers is None:
            return compute
        transfer = self.times.transfers[begin] * self._crosses(stage)
        transfer = transfer + self.times.transfers[end] * self._crosses(stage + 1)
        if not self.overlapped:
            return compute + transfer
        # Of single stages both are plain integers, which may not fit an `int64`.
        dtype = self.times.dtype
        return np.maximum(np.asarray(compute, dtype), np.asarray(transfer, dtype))

    def _crosses(self, boundary: int) -> bool:
        """Whether there are two devices at a boundary; at both ends nothing is sent anyway."""
        return (
            self.stage_devices[boundary - 1 : boundary]
            != (self.stage_devices[boundary : boundary + 1])
        )

    def allowed(self, stage: int, begin: Ints, end: Ints) -> Ints:
        """Whether stages are allowed, time left aside.

        Args:
            stage: index of the stage.
            begin: boundaries where it begins, n of them.
            end: boundaries where it ends, m of them.

        Returns:
            An n x m array of booleans.
        """
        first, last = self.first_end(begin), self.last_end(stage, begin)
        return (end[None, :] >= first[:, None]) & (end[None, :] <= last[:, None])
