"""The default number of microbatches and remat: the fastest plan that fits into memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections.abc import Sequence

from pipemesh.errors import ScheduleError
from pipemesh.plan import Figures, Plan, Remat, predict
from pipemesh.plan.figures import MODEL, Curve, LayerFigures, Shares
from pipemesh.text import bytes_text

from .sizes import Settings

# Flops per second of a CPU core and of a GPU, and the overhead of an action. Only their ratio
# matters, and only for small microbatches.
_FLOPS = {"CPU": 3e10, "GPU": 3e13}
_SECONDS_AN_ACTION = 3e-3
# The share of a machine's memory that a plan may use.
_SHARE = 0.5
_FLOAT = 4
# Numbers that optimizers keep for each weight of the ends, and of the blocks between.
_STATES = {
    **{"adam": (2.0, 2.0), "adamw": (2.0, 2.0), "muon": (2.0, 1.0)},
    # Adafactor keeps sums of rows and columns alone.
    **{"adafactor": (0.0, 0.0), "sgd": (0.0, 0.0), "momentum": (1.0, 1.0)},
}


@dataclasses.dataclass(frozen=True)
class Choice:
    """A chosen plan and its forecast.

    Attributes:
        plan: the plan, with its number of microbatches and its remat.
        bubble: forecast share of time in which devices idle.
        memory: forecast bytes on the fullest device.
        available: bytes of a device; None if unknown.
        chosen: the values of the plan that were free.
    """

    plan: Plan
    bubble: float
    memory: int
    available: int | None
    chosen: tuple[str, ...] = ()

    def __str__(self) -> str:
        number = self.plan.num_microbatches
        texts = {
            "num_microbatches": f"{number} microbatch{'es' * (number > 1)}",
            "remat": f"remat {self.plan.remat}",
        }
        values = ", ".join(text for name, text in texts.items() if name in self.chosen)
        known = "" if self.available is None else f" of {bytes_text(self.available)}"
        memory = f"{bytes_text(self.memory)}{known} a device"
        return f"{values}: bubble {self.bubble:.0%}, about {memory}, by forecast"


def choose(
    settings: Settings,
    layer_flops: Sequence[float],
    boundaries: tuple[int, ...],
    device_type: str,
    available: int | None,
) -> Choice:
    """Returns the fastest plan whose step fits into memory, by default figures.

    `settings.CHOSEN` names the free values of the plan. Flops are of the whole batch. If nothing
    fits, it returns the plan with the least memory.
    """
    batch, plan, free = settings.BATCH_SIZE, settings.PLAN, set(settings.CHOSEN)
    plans = [plan]
    if "num_microbatches" in free:
        numbers = [n for n in range(1, batch + 1) if batch % (n * plan.num_replicas) == 0]
        plans = [other for n in numbers if (other := _with_number(plan, n)) is not None]
    if "remat" in free and available is not None:
        remats = (Remat.NONE, Remat.FULL)
        plans = [dataclasses.replace(p, remat=remat) for remat in remats for p in plans]
    figures = default_figures(settings, layer_flops, device_type)
    rated = [_rated(settings, figures, boundaries, available, plan) for plan in plans]
    fitting = [r for r in rated if available is None or r[1].memory <= available]
    if not fitting:
        return min((choice for _, choice in rated), key=lambda choice: choice.memory)
    return min(fitting, key=lambda pair: pair[0])[1]


def _with_number(plan: Plan, number: int) -> Plan | None:
    """Returns the plan with another number of microbatches; None if its schedule does not support
    it.
    """
    try:
        return dataclasses.replace(plan, num_microbatches=number)
    except ScheduleError:
        return None


def _rated(
    settings: Settings,
    figures: Figures,
    boundaries: tuple[int, ...],
    available: int | None,
    plan: Plan,
) -> tuple[float, Choice]:
    """Returns the seconds of a step, and the choice."""
    cut = dataclasses.replace(plan, boundaries=boundaries)
    forecast = predict(cut, figures, settings.BATCH_SIZE, parts=False)
    memory = max(forecast.memory)
    chosen = tuple(settings.CHOSEN)
    return forecast.seconds, Choice(plan, forecast.bubble, int(memory), available, chosen)


def default_figures(settings: Settings, layer_flops: Sequence[float], device_type: str) -> Figures:
    """Returns figures of a machine without measurements.

    The activations of a block follow Korthikanti et al., "Reducing Activation Recomputation in
    Large Transformer Models", 2022, equation 1, in 32 bits: 2 s b h (34 + 5 a s / h) bytes. The
    softmax keeps its logits and two results of their size.
    """
    plan, length, dim = settings.PLAN, settings.SEQUENCE_LENGTH, settings.MODEL_DIM
    speed = _FLOPS[device_type]
    if device_type == "CPU":
        # Logical devices share the cores.
        speed *= (os.cpu_count() or 1) / plan.mesh.num_devices
    outputs = _FLOAT * length * dim
    block = 2 * length * dim * (34 + 5 * settings.NUM_HEADS * length / dim)
    hidden = 2 * dim * settings.HIDDEN_DIM * max(1, settings.NUM_EXPERTS)
    table = settings.VOCAB_SIZE * dim
    kept = [outputs, *[block] * settings.NUM_LAYERS, 3 * _FLOAT * length * settings.VOCAB_SIZE]
    weights = [table, *[4 * dim**2 + hidden] * settings.NUM_LAYERS, table]
    # All devices of a replica can share a layer, and one program splits the vocabulary over stages.
    split = max(len(plan.home(stage)) for stage in range(plan.num_stages)) // plan.num_replicas
    blocks = range(1, 1 + settings.NUM_LAYERS)
    of_ends = {} if plan.lowering == "placement" else {f"vocab:{MODEL}": Shares(plan.num_stages)}

    def line(value: float) -> Curve:
        return Curve(((1, value),))

    layers = tuple(
        LayerFigures(
            name=str(number),
            seconds={
                kind: line(times * flops / settings.BATCH_SIZE / speed)
                for kind, times in (("F", 1), ("B", 2))
            },
            parameter_bytes=_FLOAT * size,
            kept=line(kept_bytes),
            outputs=line(outputs),
            shares={"": Shares(split)} | (of_ends if number not in blocks else {}),
            optimizer=_STATES[settings.OPTIMIZER][number in blocks],
            # Keys and values.
            past=line(2 * outputs) if number in blocks else None,
            # The gradient, before it is accumulated.
            working=Curve(((1, _FLOAT * size), (2, _FLOAT * size))),
        )
        for number, (flops, size, kept_bytes) in enumerate(
            zip(layer_flops, weights, kept, strict=True)
        )
    )
    alike = blocks.start, blocks.stop
    return Figures(layers, action=_SECONDS_AN_ACTION, update_memory=2.0, alike=alike)


def memory_of_cpu_device(devices: int) -> int:
    """Returns the bytes of this machine's memory for each of `devices` logical CPU devices."""
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limit = pathlib.Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text(encoding="ascii").strip()).isdigit():
        total = min(total, int(text))
    return int(_SHARE * total / devices)
