"""The partitioning problem in integers: allowed stages and their times."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from pipemesh.partition.costs import (
    SUM_LIMIT,
    Floats,
    Ints,
    Stack,
    decimal,
    prefix_sums,
    search,
    to_big_integers,
    to_integers,
)
from pipemesh.partition.memory import MemoryModel, memory_model
from pipemesh.partition.options import Options

Places = Ints | range
"""Ascending places of one boundary; a range if every place in between is possible."""

Candidates = list[Places]
"""The places of each of the S + 1 boundaries."""

FEW_PAIRS = 300_000
"""Up to so many pairs of boundaries, all numbers are exact and every pair is looked at."""

_FEW_LAYERS = 400
"""The same limit with virtual stages, in layers."""

_CACHED_NUMBERS = 20_000_000


def as_array(places: Places) -> Ints:
    """Returns the places of one boundary as an array."""
    return np.arange(places.start, places.stop) if isinstance(places, range) else places


def num_pairs(candidates: Candidates) -> int:
    """Returns the number of pairs of consecutive candidates, each of which is a possible stage."""
    return sum(len(begins) * len(ends) for begins, ends in itertools.pairwise(candidates))


class ComputeTimes:
    """Prefix sums of compute times, one array for each kind (device speed, share run twice)."""

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
        """Returns the compute time before each allowed boundary on a kind of stage, in units."""
        cached = self._cache.get(kind)
        if cached is not None:
            return cached
        if self._factors:
            forward, backward = self._factors[kind]
            sums = self._columns[0] * forward + self._columns[1] * backward
        else:
            # Scaling by a power of two loses only what falls below the unit.
            speed, again = self.kinds[kind]
            layers = self._columns[0] * (1 + float(again)) + self._columns[1]
            units = np.rint(np.ldexp(layers / float(speed), self._shift)).astype(np.int64)
            sums = prefix_sums(units)[self._positions]
        if (len(self._cache) + 1) * sums.size <= _CACHED_NUMBERS:
            self._cache[kind] = sums
        return sums

    def as_objects(self) -> ComputeTimes:
        """Returns the same times as Python integers, whose squares never overflow."""
        copy = ComputeTimes(self.kinds)
        copy.unit, copy.rounded, copy.dtype = self.unit, self.rounded, object
        if self.transfers is not None:
            copy.transfers = self.transfers.astype(object)
        for kind in range(len(self.kinds)):
            copy._cache[kind] = self.prefix(kind).astype(object)
        return copy

    @classmethod
    def build(
        cls,
        stack: Stack,
        positions: Ints,
        kinds: tuple[tuple[Fraction, Fraction], ...],
        bandwidth: Fraction | None,
        exact: bool,
    ) -> ComputeTimes:
        """Scales all times to integers of one unit."""
        # With `exact`, times that fit no `int64` become Python integers. Without, they are rounded
        # to a grid of 2^-59 of the total.
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
        """Scales times to a unit of which all are multiples; returns False if there is none."""
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
        # The factors must fit too, even if they only multiply zeros.
        fits = max(largest, by_transfer, *(max(pair) for pair in integers)) < SUM_LIMIT
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
    """Returns the largest common divisor; `None` if it takes too many bits."""
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
    """The allowed stages and their times; boundaries are indices into `positions`."""

    positions: Ints  # Layer index of each boundary that `same_stage` allows, 0 and n included.
    num_stages: int
    times: ComputeTimes
    kind_of_stage: tuple[int, ...]  # For each stage, its kind in `times`.
    overlapped: bool = False  # A stage takes the longer of compute and transfers, not their sum.
    memory: MemoryModel | None = None  # With a limit.
    min_layers: int = 1
    max_layers: int | None = None
    barriers: tuple[int, ...] = ()  # Ascending boundaries that no stage may span.
    pinned: tuple[tuple[int, int], ...] = ()  # Pairs of a boundary's index and its place.
    num_virtual_stages: int = 1  # Most stages of a device.
    stage_devices: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Index of the last boundary."""
        return int(self.positions.size) - 1

    @property
    def num_devices(self) -> int:
        """The number of devices that the stages run on."""
        return max(self.stage_devices) + 1

    @property
    def monotone(self) -> bool:
        """True if every part of an allowed stage is allowed and takes no longer."""
        return (
            self.times.transfers is None
            and self.min_layers <= 1
            and not (self.memory is not None and self.memory.keeps_inputs)
        )

    @property
    def forever(self) -> int:
        """A time longer than that of any stage or device."""
        total = max(int(self.times.prefix(kind)[-1]) for kind in sorted(set(self.kind_of_stage)))
        if self.times.transfers is not None:
            total += 2 * int(self.times.transfers.max()) * self.num_virtual_stages
        return total + 1

    def tied(self, bottleneck: int) -> int:
        """Returns the largest bottleneck that rounding may have made of an equal one."""
        # Rounding moves each layer by half a unit at most; float division changes the last bits.
        if not self.times.rounded:
            return bottleneck
        return bottleneck + self.size + (bottleneck >> 45)

    def prefix(self, stage: int) -> Ints:
        """Returns the compute time before each boundary on the device of a stage."""
        return self.times.prefix(self.kind_of_stage[stage])

    def cheapest_loads(self, shift: int = 0) -> Floats:
        """Returns the least time of each layer, as on the fastest device; rounded, for bounds."""
        # Stages of one share of recomputation differ in speed alone.
        kinds = {self.times.kinds[kind][1]: kind for kind in self.kind_of_stage}
        fastest = max(float(self.times.kinds[kind][0]) for kind in self.kind_of_stage)
        loads = [
            np.diff(self.times.prefix(kind) >> shift).astype(np.float64)
            * (float(self.times.kinds[kind][0]) / fastest)
            for kind in kinds.values()
        ]
        least: Floats = np.min(loads, axis=0)
        return least

    def windows(self) -> tuple[Ints, Ints]:
        """Returns the first and last place of each boundary that leave every stage a layer."""
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
        """Returns the first boundary at which a stage may end; `size + 1` if there is none."""
        if self.min_layers <= 1:
            return begin + 1
        least = self.positions[begin] + self.min_layers
        return np.searchsorted(self.positions, least, side="left")

    def last_end(self, stage: int, begin: Ints) -> Ints:
        """Returns the last boundary at which a stage may end, whatever its time is."""
        last = self.last_wall(begin)
        return last if self.memory is None else np.minimum(last, self.memory.last_end(stage, begin))

    def last_wall(self, begin: Any) -> Any:
        """Returns the last boundary that numbers of layers and barriers allow."""
        last = np.full_like(begin, self.size)
        if self.max_layers is not None:
            most = self.positions[begin] + self.max_layers
            last = np.minimum(last, search(self.positions, most, side="right") - 1)
        if self.barriers:
            walls = np.asarray((*self.barriers, self.size), dtype=np.int64)
            last = np.minimum(last, walls[search(walls[:-1], begin, side="right")])
        return last

    def stage_times(self, stage: int, begin: Ints, end: Ints) -> Ints:
        """Returns the time of a stage with its transfers; arrays of boundaries broadcast."""
        # A device sends and receives the activation of one boundary and the gradient of the other,
        # both directions at once, so each boundary counts once. Two neighbouring stages on one
        # device send nothing to each other.
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
        """Returns True between two devices, and at both ends, where nothing is sent anyway."""
        return (
            self.stage_devices[boundary - 1 : boundary]
            != (self.stage_devices[boundary : boundary + 1])
        )

    def allowed(self, stage: int, begin: Ints, end: Ints) -> Ints:
        """Returns for n begins and m ends whether stages are allowed, whatever their time is."""
        first, last = self.first_end(begin), self.last_end(stage, begin)
        return (end[None, :] >= first[:, None]) & (end[None, :] <= last[:, None])


def allowed_positions(layers: int, groups: Sequence[Sequence[int]]) -> Ints:
    """Returns the layer indices at which no group is cut, 0 and `layers` included."""
    allowed = np.ones(layers + 1, dtype=bool)
    for group in groups:
        allowed[group[0] + 1 : group[-1] + 1] = False
    return np.flatnonzero(allowed)


def build_memory(
    stack: Stack, options: Options, positions: Ints, exact: bool
) -> MemoryModel | None:
    """Builds the memory model; `None` if costs or options do not say enough."""
    microbatches_in_flight = options.microbatches_in_flight()
    if not stack.detailed or microbatches_in_flight is None:
        return None
    return memory_model(
        stack,
        positions,
        limit=options.memory_limit,
        optimizer_bytes_per_parameter_byte=options.optimizer_bytes_per_parameter_byte,
        microbatches_in_flight=microbatches_in_flight,
        remat=options.remat,
        exact=exact,
    )


def build_problem(stack: Stack, options: Options) -> Problem:
    """Turns costs and options into a problem in integers, which may have no solution."""
    stages = options.num_stages
    positions = allowed_positions(stack.num_layers, options.same_stage)
    size = int(positions.size) - 1
    if options.num_virtual_stages > 1:
        exact = size <= _FEW_LAYERS
    else:
        exact = stages * max(size - stages + 1, 0) ** 2 <= FEW_PAIRS
    speeds = options.speeds or (1.0,) * options.num_devices
    kind_by_stage = [
        (decimal(speeds[device]), again)
        for device, again in zip(options.stage_devices, options.recomputed(), strict=True)
    ]
    kinds = tuple(dict.fromkeys(kind_by_stage))
    index = {kind: number for number, kind in enumerate(kinds)}
    # A single device sends nothing.
    bandwidth = options.bandwidth if options.num_devices > 1 else None
    times = ComputeTimes.build(
        stack,
        positions,
        kinds,
        None if bandwidth is None else decimal(bandwidth),
        exact,
    )
    memory = None
    if options.memory_limit is not None:
        memory = build_memory(stack, options, positions, exact)
    return Problem(
        positions=positions,
        num_stages=stages,
        times=times,
        kind_of_stage=tuple(index[kind] for kind in kind_by_stage),
        overlapped=options.overlap_transfers,
        memory=memory,
        min_layers=options.min_layers,
        max_layers=options.max_layers,
        barriers=tuple(np.searchsorted(positions, options.fixed).tolist()),
        pinned=tuple(
            (stage, int(np.searchsorted(positions, layer))) for stage, layer in options.pinned
        ),
        num_virtual_stages=options.num_virtual_stages,
        stage_devices=options.stage_devices,
    )
