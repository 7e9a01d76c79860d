"""The result of `partition`: stages, their costs and their memory."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from typing import Any, cast

from pipemesh.errors import PartitionError
from pipemesh.partition.options import round_robin
from pipemesh.text import bytes_text, columns, count_text, number_text

_BAR_WIDTH = 30
# Of more stages than this, some are left out of tables.
MOST_ROWS = 64


@dataclasses.dataclass(frozen=True)
class Partition:
    """Contiguous stages of a layer stack, and the devices that run them.

    Attributes:
        boundaries: S + 1 rising layer indices; stage `s` holds the layers
            `boundaries[s] : boundaries[s + 1]`.
        stage_costs: the time of each stage for one microbatch, in the unit of the costs, with the
            speed of the device, recomputation and transfers.
        num_virtual_stages: stages of each device, or of the device that has most.
        placement: the device of each stage; empty if stages go round the devices, so that stage `s`
            of S runs on device `s % (S / num_virtual_stages)`.
        stage_memory: bytes that each stage holds at its peak; `None` if the costs have no bytes or
            the number of microbatches is unknown.
        memory_limit: bytes of a device, or `None`.
        method: `"exact"`, `"lingvo"` or `"uniform"`.
        layer_names: names of the layers, or empty.
        binding: the reason why the bottleneck is not smaller: options, without any of which it
            would be (with `perhaps` if the search gave up); else the one layer (or group) that is
            as large as the bottleneck; else empty. Ignored in comparisons.

    Raises:
        PartitionError: boundaries, costs, placement and numbers do not fit together.

    Example:
        >>> Partition(boundaries=(0, 1, 3), stage_costs=(4.0, 3.0)).balance
        0.875
    """

    boundaries: tuple[int, ...]
    stage_costs: tuple[float, ...]
    num_virtual_stages: int = 1
    placement: tuple[int, ...] = ()
    stage_memory: tuple[float, ...] | None = None
    memory_limit: float | None = None
    method: str = "exact"
    layer_names: tuple[str, ...] = ()
    binding: tuple[str, ...] = dataclasses.field(default=(), compare=False)

    def __post_init__(self) -> None:
        stages = len(self.stage_costs)
        if len(self.boundaries) != stages + 1 or stages == 0:
            raise PartitionError(
                f"{stages} stage costs need {stages + 1} boundaries, but there are "
                f"{len(self.boundaries)}; a partition has at least one stage"
            )
        if any(a > b for a, b in itertools.pairwise(self.boundaries)) or self.boundaries[0] != 0:
            raise PartitionError(
                f"boundaries are {self.boundaries}, but must rise from 0 to the number of layers"
            )
        if self.placement:
            counts = Counter(self.placement)
            most = max(counts.values())
            if len(self.placement) != stages or set(counts) != set(range(len(counts))):
                raise PartitionError(
                    f"placement is {self.placement}, but must name a device for each of the "
                    f"{stages} stages, from 0 without gaps"
                )
            if self.num_virtual_stages != most:
                raise PartitionError(
                    f"num_virtual_stages is {self.num_virtual_stages}, but placement has {most} "
                    "stages on a device"
                )
        elif self.num_virtual_stages < 1 or stages % self.num_virtual_stages:
            raise PartitionError(
                f"num_virtual_stages is {self.num_virtual_stages}, but must divide the "
                f"{stages} stages"
            )

    @property
    def num_stages(self) -> int:
        """The number of stages; every virtual stage counts."""
        return len(self.stage_costs)

    @property
    def stage_devices(self) -> tuple[int, ...]:
        """The device of each stage."""
        return self.placement or round_robin(self.num_stages, self.num_virtual_stages)

    @property
    def num_devices(self) -> int:
        """The number of devices that the stages run on."""
        return max(self.stage_devices) + 1

    @property
    def stages(self) -> tuple[range, ...]:
        """The layer indices of each stage."""
        return tuple(range(begin, end) for begin, end in itertools.pairwise(self.boundaries))

    @property
    def device_costs(self) -> tuple[float, ...]:
        """The summed time of each device's stages."""
        return self._on_devices(self.stage_costs)

    @property
    def device_memory(self) -> tuple[float, ...] | None:
        """The summed bytes of each device's stages, or `None` if unknown."""
        return None if self.stage_memory is None else self._on_devices(self.stage_memory)

    def _on_devices(self, values: tuple[float, ...]) -> tuple[float, ...]:
        """Sums one value per stage over the stages of each device."""
        owned: list[list[float]] = [[] for _ in range(self.num_devices)]
        for device, value in zip(self.stage_devices, values, strict=True):
            owned[device].append(value)
        return tuple(map(math.fsum, owned))

    @property
    def bottleneck(self) -> float:
        """The cost of the most expensive device; with one stage a device, of that stage."""
        return max(self.device_costs)

    @property
    def balance(self) -> float:
        """Mean device cost over the bottleneck, 1.0 if perfectly even."""
        if self.bottleneck == 0:
            return 1.0
        return math.fsum(self.device_costs) / self.num_devices / self.bottleneck

    def to_json(self, indent: int | None = None) -> str:
        """Returns all attributes as a JSON object, with `bottleneck` and `balance` beside them.

        Args:
            indent: spaces of each level; `None` puts everything on one line.
        """
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["bottleneck"] = self.bottleneck
        fields["balance"] = self.balance
        return json.dumps(fields, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> Partition:
        """Reads the text that `to_json` wrote; `bottleneck` and `balance` are computed anew.

        Raises:
            PartitionError: the text is not JSON, or does not describe a partition.
        """
        try:
            loaded: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise PartitionError(f"the partition is not valid JSON: {error}") from error
        if not isinstance(loaded, dict):
            raise PartitionError(
                "a partition must be a JSON object with the keys boundaries and stage_costs"
            )
        fields = cast("dict[str, Any]", loaded)
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(fields) - known - {"bottleneck", "balance"})
        missing = sorted({"boundaries", "stage_costs"} - set(fields))
        if unknown or missing:
            raise PartitionError(
                "a partition in JSON has the keys boundaries, stage_costs and optionally "
                f"{', '.join(sorted(known - {'boundaries', 'stage_costs'}))}; "
                f"missing: {missing}, unknown: {unknown}"
            )
        values: dict[str, Any] = {}
        for name in known & set(fields):
            value = fields[name]
            values[name] = tuple(cast("list[Any]", value)) if isinstance(value, list) else value
        numbers: dict[str, tuple[type, ...]] = {
            "boundaries": (int,),
            "placement": (int,),
            "stage_costs": (int, float),
            "stage_memory": (int, float),
        }
        for name, kinds in numbers.items():
            value = values.get(name, ())
            if name == "stage_memory" and value is None:
                continue
            if not isinstance(value, tuple) or not all(
                isinstance(number, kinds) and not isinstance(number, bool)
                for number in cast("tuple[Any, ...]", value)
            ):
                raise PartitionError(f"{name} of a partition in JSON must be a list of numbers")
        return cls(**values)

    def __str__(self) -> str:
        return table(self)


def table(plan: Partition, block: str = "█") -> str:
    """Draws a partition as a table of at most 64 stages, one row each, with bars."""
    worst = max(range(plan.num_stages), key=lambda stage: plan.stage_costs[stage])
    top = plan.stage_costs[worst] or 1.0
    shared = plan.num_virtual_stages > 1
    head = ["stage", *(["device"] if shared else []), "layers", "count", "cost"]
    head += [*(["memory"] if plan.stage_memory is not None else []), ""]
    rows = [head]
    shown = set(range(plan.num_stages))
    if plan.num_stages > MOST_ROWS:
        half = MOST_ROWS // 2
        shown = {*range(half), worst, *range(plan.num_stages - half, plan.num_stages)}
    before = -1
    for stage in sorted(shown):
        if stage != before + 1:
            rows.append(["...", *[""] * (len(head) - 1)])
        before = stage
        layers = plan.stages[stage]
        row = [str(stage), *([str(plan.stage_devices[stage])] if shared else [])]
        row += [layers_text(layers), str(len(layers)), number_text(plan.stage_costs[stage])]
        if plan.stage_memory is not None:
            row.append(bytes_text(plan.stage_memory[stage]))
        row.append(bar(plan.stage_costs[stage] / top, block))
        rows.append(row)
    lines = columns(rows, left=(2 if shared else 1, len(head) - 1))
    costs = plan.device_costs
    device = max(range(plan.num_devices), key=lambda index: costs[index])
    kind = "device" if shared else "stage"
    lines.append(
        count_text(plan.num_stages, "stage")
        + (f" on {count_text(plan.num_devices, 'device')}" if shared else "")
        + f", bottleneck {number_text(plan.bottleneck)} ({kind} {device}), "
        f"balance {plan.balance:.3f}, method {plan.method}"
    )
    if plan.device_memory is not None:
        most = max(plan.device_memory)
        limit = f" of {bytes_text(plan.memory_limit)}" if plan.memory_limit is not None else ""
        lines.append(f"most memory {bytes_text(most)}{limit}")
    if plan.binding:
        lines.append(f"the bottleneck is bound by {', '.join(plan.binding)}")
    elif plan.method == "exact" and plan.balance < 1:
        lines.append("the bottleneck is limited by layer granularity, not by options")
    return "\n".join(lines)


def bar(share: float, block: str = "█") -> str:
    """Draws a share from 0 to 1 as a bar; above 0 it is at least one block."""
    return block * max(round(share * _BAR_WIDTH), 1 if share > 0 else 0)


def layers_text(layers: range) -> str:
    """Returns the layers of a stage as text such as `4-7`, or `-` for an empty stage."""
    if not layers:
        return "-"
    return str(layers[0]) if len(layers) == 1 else f"{layers[0]}-{layers[-1]}"
