"""How a batch is cut, and what is computed again, where nobody says: the fastest that fits."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from pipemesh.errors import ScheduleError
from pipemesh.plan import Plan
from pipemesh.schedule import Costs, simulate

from .sizes import Settings

# What a core of a CPU and a GPU compute in a second, and what an action costs besides. Only their
# ratio matters, and only where microbatches are small.
_FLOPS = {"CPU": 3e10, "GPU": 3e13}
_SECONDS_AN_ACTION = 2e-3
# The share of a machine's memory that is planned with.
_SHARE = 0.5
# A weight, its gradient, two moments of Adam, and its cast or the gradient of one stage more.
_COPIES = 5


@dataclasses.dataclass(frozen=True)
class Choice:
    """How training runs.

    Attributes:
        plan: with the number of microbatches, and what the backward pass computes again.
        bubble: the share of the time that devices are expected to idle.
        memory: bytes that are expected on the fullest device.
        available: bytes that a device has; None if that is not known.
    """

    plan: Plan
    bubble: float
    memory: int
    available: int | None

    def __str__(self) -> str:
        known = "" if self.available is None else f" of {_gigabytes(self.available)}"
        return (
            f"{self.plan.num_microbatches} microbatches, remat {self.plan.remat}: "
            f"bubble {self.bubble:.0%}, about {_gigabytes(self.memory)}{known} GB a device"
        )


def choose(
    settings: Settings,
    stage_flops: Sequence[float],
    device_type: str,
    available: int | None,
) -> Choice:
    """The fastest way to run a step that fits into memory.

    Args:
        settings: of the model; `CHOSEN` names what of its plan is free.
        stage_flops: of the forward pass of each stage, for the whole batch.
        device_type: `CPU` or `GPU`.
        available: bytes of memory a device; None if that is not known.

    Returns:
        The choice; if nothing fits, what needs least memory.
    """
    batch, plan, free = settings.BATCH_SIZE, settings.PLAN, set(settings.CHOSEN)
    plans = [plan]
    if "num_microbatches" in free:
        numbers = [n for n in range(1, batch + 1) if batch % (n * plan.num_replicas) == 0]
        plans = [other for n in numbers if (other := _with_number(plan, n)) is not None]
    if "remat" in free and available is not None:
        plans = [dataclasses.replace(p, remat=remat) for remat in ("none", "full") for p in plans]
    rated = [_rated(settings, stage_flops, device_type, available, plan) for plan in plans]
    fitting = [r for r in rated if available is None or r[1].memory <= available]
    if not fitting:
        return min((choice for _, choice in rated), key=lambda choice: choice.memory)
    return min(fitting, key=lambda pair: pair[0])[1]


def _with_number(plan: Plan, number: int) -> Plan | None:
    """The plan with so many microbatches; None if its schedule cannot be had for them."""
    try:
        return dataclasses.replace(plan, num_microbatches=number)
    except ScheduleError:
        return None


def _rated(
    settings: Settings,
    stage_flops: Sequence[float],
    device_type: str,
    available: int | None,
    plan: Plan,
) -> tuple[float, Choice]:
    """How long a step would take in seconds, and the choice."""
    devices, parts = plan.mesh.num_stages, plan.num_microbatches * plan.num_replicas
    speed = _FLOPS[device_type]
    if device_type == "CPU":
        # Its cores are all that its logical devices have.
        cores = os.cpu_count() or 1
        speed *= cores / min(devices * plan.num_replicas, cores)
    homes = [len(plan.home(stage)) for stage in range(len(stage_flops))]
    forward = [
        flops * max(homes) / home / parts / speed + _SECONDS_AN_ACTION
        for flops, home in zip(stage_flops, homes, strict=True)
    ]
    again = plan.remat == "full"
    input_grad = [(1 + again) * seconds for seconds in forward]
    timeline = simulate(plan.table, Costs(forward, input_grad=input_grad, weight_grad=forward))
    stages = len(stage_flops) / devices
    in_flight = max(timeline.peak_activations) / stages
    memory = _memory(settings, parts, in_flight, again, devices)
    if plan.lowering == "simd":
        # All devices compute the softmax for all microbatches at once.
        memory += (parts // plan.num_replicas - 1) * _softmax(settings, parts)
    return timeline.makespan, Choice(plan, timeline.bubble_ratio, memory, available)


def _memory(settings: Settings, number: int, in_flight: float, again: bool, devices: int) -> int:
    """Bytes on the device that holds most, where the batch is cut into a number of parts.

    The activations of a block are those of Korthikanti et al., "Reducing Activation Recomputation
    in Large Transformer Models", 2022, equation 1, in 32 bits: 2 s b h (34 + 5 a s / h) bytes.
    """
    rows = settings.BATCH_SIZE // number
    length, dim = settings.SEQUENCE_LENGTH, settings.MODEL_DIM
    tokens = rows * length
    block = 2 * tokens * dim * (34 + 5 * settings.NUM_HEADS * length / dim)
    blocks = settings.NUM_LAYERS / devices
    stage = blocks * block + _softmax(settings, number)
    held = in_flight * 4 * tokens * dim + stage if again else in_flight * stage
    weights = blocks * (4 * dim**2 + 2 * dim * settings.HIDDEN_DIM) + settings.VOCAB_SIZE * dim
    return int(held + _COPIES * 4 * weights)


def _softmax(settings: Settings, number: int) -> int:
    """Bytes of the logits of a microbatch, and of what is made of them."""
    tokens = settings.BATCH_SIZE // number * settings.SEQUENCE_LENGTH
    return 3 * 4 * tokens * settings.VOCAB_SIZE


def memory_of_cpu_device(devices: int) -> int:
    """Bytes that each of some logical CPU devices may take of this machine's memory.

    Args:
        devices: how many share it.
    """
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        total = min(total, int(text))
    return int(_SHARE * total / devices)


def _gigabytes(number: int) -> str:
    return f"{number / 1e9:.1f}"
