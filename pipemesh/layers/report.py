"""Predicted memory, traffic and idle time of a step of a stack, before the first one runs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from pipemesh.backend.devices import short_name
from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import all_layers
from pipemesh.layers.named import NamedLayer
from pipemesh.layers.partition_layers import Meta, layer_metas, output_bytes
from pipemesh.layers.pipeline.slices import row_work
from pipemesh.mesh import Shape
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.plan import Remat
from pipemesh.plan.homes import home_of
from pipemesh.plan.slices import Progress, slice_shares, spans_of
from pipemesh.recurrent import DeviceMemory, Home, Transfer
from pipemesh.recurrent.forecast import memory_of, transfers_of
from pipemesh.schedule import Costs, Schedule, Timeline, simulate
from pipemesh.text import bytes_text, columns


@dataclasses.dataclass(frozen=True)
class Sent:
    """Traffic along some axes in a step."""

    axes: str  # names, joined by `+`
    what: str  # `activations`, `gradients`, `weights` and so on, or a primitive and its pass
    times: int  # the number of transfers of a device
    bytes: int  # of all devices together


@dataclasses.dataclass(frozen=True)
class WeightLayout:
    """The layout of a weight on the devices."""

    name: str  # with the path of its layer
    shape: str  # with names of dims, if it has any
    cut: str  # the dims that are cut, each with the number of slices
    devices: tuple[str, ...]  # of each slice
    bytes: int  # of the whole weight


@dataclasses.dataclass(frozen=True)
class LayerSize:
    """The costs of a layer by its `FPropMeta`, for a replica's part of a microbatch."""

    name: str  # of its class
    flops: float  # of its forward pass, on all devices that share it
    parameter_bytes: float | None  # all slices together
    activation_bytes: float | None  # kept on all its devices for the backward pass
    output_bytes: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The facts known about a step before it runs.

    Attributes:
        memory: the memory of each device.
        optimizer: bytes of the optimizer's variables, by device.
        sent: the traffic along each axis.
        bubble: the share of time that devices wait for each other, if durations are proportional to
            flops.
        flops: flops of a step's matmuls: three times the forward pass, without recomputation
            (Chowdhery et al., "PaLM", 2022, appendix B).
        weights: the layout of each weight.
        timeline: the timeline of actions whose durations are proportional to their flops.
        layers: the layers of each stage.
        slice_lengths: the positions of each slice, if sequences are cut into slices.
    """

    memory: tuple[DeviceMemory, ...]
    optimizer: dict[str, int]
    sent: tuple[Sent, ...]
    bubble: float
    flops: float
    weights: tuple[WeightLayout, ...]
    timeline: Timeline
    layers: tuple[tuple[LayerSize, ...], ...] = ()
    slice_lengths: tuple[int, ...] = ()

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            ("device", "weights", "optimizer", "gradients", "activations", "in all")
        ]
        for device in self.memory:
            state = self.optimizer.get(device.device, 0)
            weights = device.weights + device.variables + device.fetched
            parts = (weights, state, device.gradients, device.kept)
            rows.append((device.device, *map(bytes_text, (*parts, sum(parts)))))
        lines = columns(rows)
        if self.sent:
            sent = [("axis", "what", "times", "bytes")]
            sent += [(s.axes, s.what, f"{s.times:,}", bytes_text(s.bytes)) for s in self.sent]
            lines += ["", *columns(sent, left=(0, 1))]
        lines += ["", f"bubble {self.bubble:.1%}"]
        if self.slice_lengths:
            lines.append(f"slices of {', '.join(f'{n:,}' for n in self.slice_lengths)} positions")
        return "\n".join(lines)

    def layout(self) -> str:
        """Returns a line for each weight: its name, shape, cut, bytes and devices."""
        rows = [("weight", "shape", "cut", "bytes", "devices")]
        rows += [
            (w.name, w.shape, w.cut or "-", bytes_text(w.bytes), " ".join(w.devices))
            for w in self.weights
        ]
        return "\n".join(columns(rows, left=(0, 1, 2, 4)))


def report(stack: Any, run: Any, shapes: Sequence[Any], optimizer: Sequence[Any] = ()) -> Report:
    """Predicts a training step of a `PipeliningLayer`.

    It traces nothing: `stack.noted_run` gets the run when the step's graph is built.

    Args:
        stack: the layer, on the cluster that it was made on.
        run: the argument that `stack.noted_run` was called with.
        shapes: a `tshape.Shape` of each input, for a replica's part of a microbatch.
        optimizer: the optimizer's variables.

    Returns:
        The report.

    Raises:
        PartitionError: a layer has no `FPropMeta`.
    """
    homes = stack.StageHomes()
    metas = _metas(stack, homes, shapes)
    held: collections.Counter[str] = collections.Counter()
    for variable in optimizer:
        held[short_name(variable.device)] += num_bytes([variable])
    number = stack.schedule.num_microbatches
    inside = _inside(metas, number, homes)
    memory = [dataclasses.replace(m, device=short_name(m.device)) for m in memory_of(run)]
    flops = [sum(meta.flops for meta in of_stage) for of_stage in metas]
    # All devices of a replica compute at the same time.
    forward = [number / home.group for number, home in zip(flops, homes, strict=True)]
    again = _again(stack.plan.remat, stack.schedule)
    costs = Costs(
        forward,
        input_grad=[(1 + times[0]) * f for times, f in zip(again, forward, strict=True)],
        weight_grad=[(1 + times[1]) * f for times, f in zip(again, forward, strict=True)],
    )
    lengths = tuple(run.machine.cutting.slice_lengths) if run.num_slices > 1 else ()
    shares = _slice_shares(stack, shapes, lengths) if lengths else ()
    costs = costs.refined(1, max(1, len(lengths)))
    timeline = simulate(stack.schedule, costs, slice_shares=shares)
    return Report(
        memory=tuple(memory),
        optimizer=dict(held),
        # Traffic inside actions is listed by primitive.
        sent=(*_between(transfers_of(run, inside=False), stack, homes), *inside),
        bubble=timeline.bubble_ratio,
        flops=3 * number * homes[0].num_replicas * sum(flops),
        weights=tuple(layout for layer in all_layers(stack) for layout in _layouts(layer)),
        timeline=timeline,
        slice_lengths=lengths,
        layers=tuple(
            tuple(
                LayerSize(
                    layer.cls.__name__,
                    meta.flops,
                    meta.parameter_bytes,
                    meta.activation_bytes,
                    output_bytes(meta, stack.params.fprop_dtype),
                )
                for layer, meta in zip(cell.sub, of_stage, strict=True)
            )
            for cell, of_stage in zip(stack.params.cell_tpl, metas, strict=True)
        ),
    )


def _slice_shares(stack: Any, shapes: Sequence[Any], lengths: Sequence[int]) -> list[list[float]]:
    """Returns for each stage the flops of its slices, as multiples of their mean."""
    stages = [list(cell.sub) for cell in stack.params.cell_tpl]
    layers = list(itertools.chain(*stages))
    try:
        work = iter(row_work(stack.params.name, layers, shapes, stack.sequence_dim))
    except PipelineError:
        # Slices of equal length need no layer that counts the work of parts of a row.
        return []
    rows = [[next(work) for _ in layers] for layers in stages]
    return [
        slice_shares(spans_of(lengths), [(sum(parts), Progress(parts)) for parts in of_stage])
        for of_stage in rows
    ]


def _again(remat: Remat, schedule: Schedule) -> list[tuple[float, float]]:
    """Returns how often each stage's input and weight gradient recompute it, on average."""
    number = schedule.num_microbatches
    if remat.is_custom:
        return [(0, 0)] * schedule.num_stages
    modes, apart = remat.modes(schedule), schedule.recomputed()
    again = [
        [modes[stage, m] if (stage, m) not in apart else "none" for m in range(number)]
        for stage in range(schedule.num_stages)
    ]
    return [
        (sum(mode != "none" for mode in of_stage) / number, of_stage.count("twice") / number)
        for of_stage in again
    ]


def _metas(stack: Any, homes: Sequence[Home], shapes: Sequence[Any]) -> list[list[Meta]]:
    """Returns the `FPropMeta` of the layers of each stage, under the stage's lowering."""
    metas: list[list[Meta]] = []
    for cell, home, lowering in zip(
        stack.params.cell_tpl, homes, stack.stage_lowerings, strict=True
    ):
        children = stack.children[cell.name].children
        with lowering.on(home.replica(0)):
            metas.append(layer_metas([children[sub.name].params for sub in cell.sub], *shapes))
        shapes = metas[-1][-1].out_shapes if metas[-1] else shapes
    return metas


def _between(transfers: Sequence[Transfer], stack: Any, homes: Sequence[Home]) -> list[Sent]:
    """Sums the traffic between actions, by the axes in which source and target differ."""
    mesh, rules = stack.plan.mesh, stack.plan.layout
    # The mesh coordinates of each device.
    at: dict[str, dict[str, int]] = {}
    for home, place in zip(homes, stack.schedule.stage_devices, strict=True):
        processors = home_of(mesh, rules, place % mesh.num_stages)
        for device, processor in zip(home.devices, processors, strict=True):
            at.setdefault(short_name(device), mesh.coordinates(processor))
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for transfer in transfers:
        source, target = at[short_name(transfer.source)], at[short_name(transfer.target)]
        differing = [axis for axis in source if source[axis] != target[axis]]
        # Between homes of different shapes, a slice may move along other axes too.
        axes = LAYERS_AXIS if LAYERS_AXIS in differing else "+".join(differing)
        key = axes, transfer.what
        times[key] = max(times[key], transfer.times)
        sums[key] += transfer.bytes
    return [Sent(*key, times[key], sums[key]) for key in sorted(sums)]


def _inside(
    metas: Sequence[Sequence[Meta]], num_microbatches: int, homes: Sequence[Home]
) -> list[Sent]:
    """Sums the traffic inside actions, by primitive."""
    times: collections.Counter[tuple[str, str]] = collections.Counter()
    sums: collections.Counter[tuple[str, str]] = collections.Counter()
    for of_stage, home in zip(metas, homes, strict=True):
        calls: collections.Counter[tuple[str, str]] = collections.Counter()
        for costs in filter(None, (meta.communication for meta in of_stage)):
            for (axes, primitive, direction), (number, sent) in costs.rows.items():
                key = "+".join(axes), f"{primitive} {direction}"
                calls[key] += number * num_microbatches
                sums[key] += sent * num_microbatches * len(home)
        # The larger number of each.
        times |= calls
    return [Sent(*key, times[key], sums[key]) for key in sorted(sums)]


def _layouts(layer: Any) -> Iterator[WeightLayout]:
    """Yields the layouts of a layer's own weights."""
    shapes: dict[str, Shape] = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    named = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
    weights: dict[str, list[Any]] = {}
    for name, variable in layer._private_vars.items():
        is_slice = name in named and name not in shapes
        weights.setdefault(name.rpartition("_slice_")[0] if is_slice else name, []).append(variable)
    for name, parts in weights.items():
        sizes, shape = parts[0].shape.as_list(), shapes.get(name)
        cut = []
        for dim, size in zip(shape or (), sizes, strict=shape is not None):
            if size and dim.size != size:
                # The last slice may be shorter.
                number = -(-dim.size // size)
                is_padded = number * size != dim.size
                padded = f" (computed as {number * size:,})" if is_padded else ""
                cut.append(f"{dim.name}/{number}{padded}")
        yield WeightLayout(
            f"{layer.path}.{name}",
            "x".join(map(str, sizes)) if shape is None else str(shape),
            ";".join(cut),
            tuple(short_name(part.device) for part in parts),
            num_bytes(parts),
        )
