"""The stages of a plan: time and memory of their actions, from the figures of their layers."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence

from pipemesh.errors import PartitionError, PlanError
from pipemesh.partition import partition
from pipemesh.plan.figures import Figures, LayerFigures
from pipemesh.plan.homes import home_of
from pipemesh.plan.network import Link, Network, reduced_bytes
from pipemesh.plan.plan import Plan
from pipemesh.plan.remat import ModeName, Remat
from pipemesh.plan.slices import Progress, equal_work_lengths, slice_shares, spans_of
from pipemesh.schedule import Action, Costs, Schedule
from pipemesh.schedule.action import KINDS
from pipemesh.schedule.costs import FIELD_OF


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of a plan, and how its devices share them."""

    layers: tuple[tuple[LayerFigures, ...], ...]
    rows: float  # of a replica's microbatch, or of a slice's share of it
    replicas: int
    # For each stage the number of devices that share a replica's part of it.
    groups: tuple[int, ...]
    remat: Remat
    table: Schedule  # each slice of sequences is a microbatch of its own
    # Devices that share a layer are side by side, then replicas, then stages. None if the links of
    # the figures connect all devices.
    network: Network | None = None
    # Bytes, per byte of weights, of their copy in the dtype of computation; 0 without one.
    cast: float = 0.0
    # Those of `Figures.layouts` that say how devices share the layers.
    rules: str = ""
    # Numbers of devices from one to the next of those that share a layer, and of replicas; None for
    # the order above.
    strides: tuple[int, int] | None = None
    slices: int = 1  # of each sequence
    # For each slice its first position and that of the next one, as shares of a row; empty if
    # sequences are whole.
    spans: tuple[tuple[float, float], ...] = ()

    def slice_rows(self, piece: int) -> float:
        """Returns the rows of a microbatch, or of a slice's share of it."""
        if not self.spans:
            return self.rows
        begin, end = self.spans[piece % len(self.spans)]
        return self.rows * (end - begin) * len(self.spans)

    @functools.cached_property
    def slice_shares(self) -> list[list[float]]:
        """Returns for each stage the work of its slices, as multiples of their mean."""

        def work(layer: LayerFigures) -> tuple[float, Progress]:
            # Layers take their seconds; flops say which positions take them.
            seconds = layer.takes("F", self.rows) + layer.takes("B", self.rows)
            return seconds, Progress(layer.row_work)

        return [
            slice_shares(self.spans, [*map(work, layers)])
            for layers in (self.layers if self.spans else ())
        ]

    @functools.cached_property
    def modes(self) -> dict[tuple[int, int], ModeName]:
        """Returns what the backward pass of each (stage, microbatch) recomputes."""
        return self.remat.modes(self.table)

    @functools.cached_property
    def run(self) -> Schedule:
        """Returns the schedule with an `R` before each backward pass that recomputes."""
        # An `R` needs no gradient, so a device runs it while it waits for one.
        known = self.table.recomputed()

        def is_added(action: Action) -> bool:
            pair = action.stage, action.microbatch
            return action.kind in "BI" and pair not in known and self.modes[pair] != "none"

        rows = tuple(
            tuple(
                part
                for action in row
                for part in ([action.also("R")] if is_added(action) else []) + [action]
            )
            for row in self.table.rows
        )
        return dataclasses.replace(self.table, rows=rows)

    @functools.cached_property
    def twice(self) -> frozenset[int]:
        """Returns the stages whose `W` recomputes the forward pass once more."""
        known = self.table.recomputed()
        twice = (pair for pair, mode in self.modes.items() if mode == "twice")
        return frozenset(stage for stage, m in twice if (stage, m) not in known)

    def home_size(self, stage: int) -> int:
        """Returns the number of devices of a stage's home."""
        return self.replicas * self.groups[stage]

    @functools.cached_property
    def home_sizes(self) -> tuple[int, ...]:
        """Returns the number of devices of each home, along the axis `layers`."""
        sizes = {home: self.home_size(s) for s, home in enumerate(self.table.stage_devices)}
        return tuple(sizes[home] for home in range(self.table.num_devices))

    def shared(self, stage: int, layer: LayerFigures) -> int:
        """Returns the number of devices of a replica among which a layer is split."""
        return layer.shared(self.rules).among(self.groups[stage])

    def part(self, stage: int, layer: LayerFigures) -> float:
        """Returns the part of a layer's work that each device of a replica computes."""
        return layer.part(self.rules, self.groups[stage])

    def held_part(self, stage: int, layer: LayerFigures) -> float:
        """Returns the part of a layer's weights that each device of a replica computes with."""
        shares = layer.shared(self.rules)
        return shares.part(self.groups[stage], shares.weights)

    def cut(self, stage: int, layer: LayerFigures) -> float:
        """Returns the part of a layer's weights that is of these, and cut over replicas."""
        return self.held_part(stage, layer) * layer.shared(self.rules).cut * (self.replicas > 1)

    def weights(self, stage: int) -> float:
        """Returns the bytes of a device's slices of a stage's weights."""
        away = 1 - 1 / self.replicas
        return sum(
            layer.parameter_bytes * (self.held_part(stage, layer) - away * self.cut(stage, layer))
            for layer in self.layers[stage]
        )

    @functools.cached_property
    def alone(self) -> frozenset[int]:
        """Returns the stages whose home has no other one, so that they keep what they fetch."""
        homes = self.table.stage_devices
        counts = collections.Counter(homes)
        return frozenset(stage for stage, home in enumerate(homes) if counts[home] == 1)

    def fetched(self, stage: int) -> float:
        """Returns the bytes of the stage's weights that a device joins from those of replicas."""
        if self.replicas == 1:
            return 0.0
        return sum(layer.parameter_bytes * self.cut(stage, layer) for layer in self.layers[stage])

    def trained(self, stage: int) -> float:
        """Returns the bytes of weights that are trained, as many as their gradients have."""
        return sum(
            layer.trained_bytes * self.held_part(stage, layer) for layer in self.layers[stage]
        )

    def states(self, stage: int, default: float) -> float:
        """Returns the bytes of the optimizer's state of those; `default` is bytes per byte."""
        return sum(
            layer.trained_bytes
            * self.held_part(stage, layer)
            * (default if layer.optimizer is None else layer.optimizer)
            for layer in self.layers[stage]
        )

    def passed(self, stage: int) -> float:
        """Returns the bytes of a microbatch's outputs of a stage on a device."""
        layer, shares = self.layers[stage][-1], self.layers[stage][-1].shared(self.rules)
        return layer.outputs.at(self.rows) * shares.part(self.groups[stage], shares.outputs)


def stages_of(plan: Plan, figures: Figures, batch: int, network: Network | None = None) -> Stages:
    """Returns the stages of a plan, cut at its boundaries or else into equal seconds."""
    if plan.lowering != "placement":
        raise PlanError(
            f"lowering={plan.lowering} has no actions, which this is about; use lowering=placement"
        )
    plan.check_batch(batch)
    plan.check_layers(len(figures.layers))
    replicas = plan.num_replicas
    rows = batch / plan.table.num_pieces / replicas
    homes = [home_of(plan.mesh, plan.layout, place) for place in range(plan.mesh.num_stages)]
    groups = tuple(len(homes[place]) // replicas for place in plan.table.stage_devices)
    rules = figures.layout_of(plan.layout) or ""
    # Slices of whole sequences are taken as rows: all of a sequence's take what a row does.
    table = plan.table.by_pieces()
    stages = cut_stages(
        figures, rows, replicas, groups, plan.remat, table, plan.boundaries, network, rules
    )
    slices, spans = plan.table.num_slices, _spans(plan, figures)
    return in_dtype(dataclasses.replace(stages, slices=slices, spans=spans), plan)


def _spans(plan: Plan, figures: Figures) -> tuple[tuple[float, float], ...]:
    """Returns where the slices of a row begin and end, as shares of it."""
    count = plan.table.num_slices
    if count == 1:
        return ()
    if not plan.has_slices_of_equal_work:
        return spans_of([1] * count)
    # Where the positions of a row are unknown, of many.
    length = figures.positions or 1024 * count * plan.slice_multiple
    return spans_of(equal_work_lengths(figures.row_progress, length, count, plan.slice_multiple))


def in_dtype(stages: Stages, plan: Plan) -> Stages:
    """Returns the stages with values of a plan's dtype of computation."""
    share = bytes_of(plan.compute_dtype) / bytes_of(None)
    if share == 1:
        return stages
    layers = tuple(tuple(layer.narrower(share) for layer in members) for members in stages.layers)
    return dataclasses.replace(stages, layers=layers, cast=share)


def bytes_of(compute_dtype: str | None) -> int:
    """Returns the bytes of a value of a `Plan.compute_dtype`; figures are of float32."""
    return 2 if compute_dtype in ("bfloat16", "float16") else 4


def evenly_cut(plan: Plan, figures: Figures, batch: int) -> Plan:
    """Returns the plan with boundaries of stages that take the same time; under `lowering=simd`
    there is one way to cut.
    """
    if plan.lowering == "simd":
        return dataclasses.replace(plan, boundaries=alike_cuts(plan, figures))
    stages = stages_of(dataclasses.replace(plan, boundaries=None), figures, batch)
    cuts = itertools.accumulate(map(len, stages.layers), initial=0)
    return dataclasses.replace(plan, boundaries=tuple(cuts))


def alike_cuts(plan: Plan, figures: Figures) -> tuple[int, ...]:
    """Returns the boundaries of `lowering=simd`: each stage has as many of the alike layers."""
    (begin, end), count = figures.alike, plan.num_stages
    number, rest = divmod(end - begin, count)
    if rest or not number:
        raise PlanError(
            f"lowering=simd gives each of {count} stages as many of the layers that are alike and "
            f"have named dims, of which there are {end - begin}; use a number of stages that "
            "divides it, or lowering=placement"
        )
    return (0, *(begin + number * stage for stage in range(1, count)), len(figures.layers))


def cut_stages(
    figures: Figures,
    rows: float,
    replicas: int,
    groups: tuple[int, ...],
    remat: Remat,
    table: Schedule,
    boundaries: tuple[int, ...] | None = None,
    network: Network | None = None,
    rules: str = "",
) -> Stages:
    """Cuts layers into the stages of a table, without boundaries into equal seconds."""
    if boundaries is None:
        modes = remat.modes(table).values()
        again = sum(mode != "none" for mode in modes) / len(modes)
        is_even = len(set(groups)) == 1
        costs = layer_seconds(figures, rows, groups[0] if is_even else 1, again, rules)
        boundaries = cut_evenly(tuple(costs), table.stage_devices, () if is_even else groups)
    layers = tuple(figures.layers[a:b] for a, b in itertools.pairwise(boundaries))
    return Stages(layers, rows, replicas, groups, remat, table, network, rules=rules)


def layer_seconds(
    figures: Figures, rows: float, group: int, again: float, rules: str = ""
) -> list[float]:
    """Returns the seconds of each layer for a microbatch, `again` of it computed twice."""
    seconds: list[float] = []
    for layer in figures.layers:
        plain, more = layer.takes("B", rows), layer.takes("B", rows, True)
        whole = layer.takes("F", rows) + plain + again * (more - plain)
        seconds.append(whole * layer.part(rules, group))
    return seconds


@functools.lru_cache(maxsize=1024)
def cut_evenly(
    costs: tuple[float, ...], stage_devices: tuple[int, ...], speeds: tuple[int, ...] = ()
) -> tuple[int, ...]:
    """Returns boundaries that minimize the busiest device's work; homes may differ in speed."""
    number = len(stage_devices)
    if len(set(stage_devices)) == number:
        return partition(list(costs), number, speeds=speeds or None).boundaries
    try:
        return partition(list(costs), number, stage_devices=list(stage_devices)).boundaries
    except PartitionError:
        # The search of devices with several stages grows too large for many layers.
        return partition(list(costs), number).boundaries


def action_costs(
    stages: Stages, figures: Figures, *, sums: bool = True, transfers: bool = True
) -> Costs:
    """Returns the durations of each stage's actions, with or without sums and transfers."""
    # Recomputation is the `R` of `Stages.run`, which has no overhead.

    def of(kind: str) -> list[float]:
        return [
            (figures.action if kind != "R" else 0.0)
            + sum(
                _takes(stages, stage, number, kind, LayerFigures.takes) * stages.part(stage, layer)
                + (_sum(stages, figures, stage, layer, kind)[0] if sums else 0.0)
                for number, layer in enumerate(layers)
            )
            + (_fetch(stages, figures, stage, kind)[0] if sums else 0.0)
            for stage, layers in enumerate(stages.layers)
        ]

    none = [0.0] * len(stages.layers)
    sent = _transfers(stages, figures) if transfers else none
    fetches = _fetches(stages, figures) if sums else none
    return Costs(of("F"), of("B"), of("I"), of("W"), sent, of("R"), all_gather=fetches)


def _transfers(stages: Stages, figures: Figures) -> list[float]:
    """Returns the seconds over the boundary above each stage, slice to slice."""
    homes, sizes = stages.table.stage_devices, stages.home_sizes
    begins = [0, *itertools.accumulate(sizes)]
    seconds: list[float] = []
    for stage in range(len(stages.layers)):
        link = figures.transfer
        if (network := stages.network) is not None:
            here, above = homes[stage], homes[min(stage + 1, len(homes) - 1)]
            link = network.joining(begins[here], begins[above], min(sizes[here], sizes[above]))
        seconds.append(link.seconds(stages.passed(stage)))
    return seconds


def action_loads(
    stages: Stages, figures: Figures, costs: Costs, *, sums: bool = True
) -> dict[str, list[float]]:
    """Returns the cores that an action of each kind and stage keeps busy when alone."""
    durations = costs.per_stage(len(stages.layers)).durations()

    def load(kind: str, stage: int) -> float:
        took = durations[kind][stage]
        layers = stages.layers[stage]
        if not took or not any(layer.work for layer in layers):
            return figures.loads.get("F" if kind == "R" else kind, 1.0)
        # The overhead of actions keeps a core busy.
        more = 0.0
        for number, layer in enumerate(layers):
            done = _takes(stages, stage, number, kind, LayerFigures.computes)
            alone = _takes(stages, stage, number, kind, LayerFigures.takes)
            more += (done - alone) * stages.part(stage, layer)
            if sums:
                seconds, work = _sum(stages, figures, stage, layer, kind)
                more += work - seconds
        if sums:
            seconds, work = _fetch(stages, figures, stage, kind)
            more += work - seconds
        return max(0.0, 1 + more / took)

    return {kind: [load(kind, s) for s in range(len(stages.layers))] for kind in KINDS}


def _takes(
    stages: Stages,
    stage: int,
    number: int,
    kind: str,
    measure: Callable[[LayerFigures, str, float, bool], float],
) -> float:
    """Returns the seconds or the work of a layer for an action, by `takes` or `computes`."""
    layers, rows = stages.layers[stage], stages.rows
    layer = layers[number]
    is_twice = kind == "W" and stage in stages.twice
    seconds = measure(layer, kind, rows, False) if kind != "R" else 0.0
    if kind == "R" or is_twice:
        again = max(0.0, measure(layer, "B", rows, True) - measure(layer, "B", rows, False))
        seconds += again * (layer.again if number == len(layers) - 1 else 1.0)
    return seconds


def even_loads(
    loads: Mapping[str, Sequence[float]], costs: Costs, number: int
) -> dict[str, list[float]]:
    """Returns the loads of equal stages that compute the same total as the given ones."""
    durations = costs.per_stage(number).durations()

    def mean(kind: str) -> float:
        took = sum(durations[kind])
        done = sum(map(operator.mul, durations[kind], loads[kind]))
        return done / took if took else 1.0

    return {kind: [mean(kind)] * number for kind in loads}


def _sum(
    stages: Stages, figures: Figures, stage: int, layer: LayerFigures, kind: str
) -> tuple[float, float]:
    """Returns the seconds of an action in which devices exchange parts of a layer, and the work of
    that on each device.
    """
    # A `W` needs neither weights nor activations of others, unless it recomputes them.
    if kind == "W" and stage not in stages.twice:
        return 0.0, 0.0
    seconds = work = 0.0
    if (shared := stages.shared(stage, layer)) > 1:
        link = figures.sums or figures.transfer
        for each in layer.shared(stages.rules).sent:
            if each.backward == (kind in "BI"):
                sent = each.sent(shared, stages.rows)
                stride = stages.strides[0] if stages.strides else 1
                took, done = exchanged(stages, figures, link, each.primitive, shared, stride, sent)
                seconds, work = seconds + each.calls * took, work + each.calls * done
    return seconds, work


def weight_fetch(stages: Stages, figures: Figures, stage: int) -> tuple[float, float]:
    """Returns the seconds in which a device fetches a stage's weights, and its work for that."""
    sent = stages.fetched(stage) * (1 - 1 / stages.replicas)
    stride = stages.strides[1] if stages.strides else stages.groups[stage]
    link, replicas = figures.transfer, stages.replicas
    return exchanged(stages, figures, link, "all_gather", replicas, stride, sent)


def _fetches(stages: Stages, figures: Figures) -> list[float]:
    """Returns `Costs.all_gather`: the seconds of each fetch that devices do beside actions."""
    number = range(len(stages.layers))
    fetches = [weight_fetch(stages, figures, stage) for stage in number]
    if figures.cores is None:
        return [seconds for seconds, _ in fetches]
    # All stages that fetch once do it at time 0, on the available cores.
    every = sum(stages.home_size(stage) * fetches[stage][1] for stage in stages.alone)
    every /= figures.cores
    return [
        max(seconds, every) if stage in stages.alone and seconds else 0.0
        for stage, (seconds, _) in enumerate(fetches)
    ]


def _fetch(stages: Stages, figures: Figures, stage: int, kind: str) -> tuple[float, float]:
    """Returns the seconds of an action in which its device fetches weights, and its work then."""
    # Cores that devices share copy the weights themselves, so they cannot compute meanwhile. A `W`
    # that recomputes needs weights, which `Costs.all_gather` does not know.
    in_action = kind in "FBI" and figures.cores is not None
    again = kind == "W" and stage in stages.twice
    if stage in stages.alone or not (in_action or again):
        return 0.0, 0.0
    return weight_fetch(stages, figures, stage)


def gradient_sum(stages: Stages, figures: Figures, stage: int) -> tuple[float, float]:
    """Returns the seconds in which replicas sum a stage's gradients, and their work on a device."""
    whole = sum(
        layer.trained_bytes * (stages.held_part(stage, layer) - stages.cut(stage, layer))
        for layer in stages.layers[stage]
    )
    away = 1 - 1 / stages.replicas
    # A weight with copies gets its gradient from all replicas, and goes to all of them; one that is
    # cut stays where it is.
    sent = {
        "all_reduce": 2 * away * whole,
        "reduce_scatter": away * (stages.trained(stage) - whole),
    }
    stride = stages.strides[1] if stages.strides else stages.groups[stage]
    parts = [
        exchanged(stages, figures, figures.transfer, primitive, stages.replicas, stride, size)
        for primitive, size in sent.items()
    ]
    return sum(seconds for seconds, _ in parts), sum(work for _, work in parts)


def exchanged(
    stages: Stages,
    figures: Figures,
    link: Link,
    primitive: str,
    members: int,
    stride: int,
    sent: float,
) -> tuple[float, float]:
    """Returns the seconds of a primitive in which each device of a group sends so many bytes, and
    its work on each device.
    """
    if members == 1 or not sent:
        return 0.0, 0.0
    if (network := stages.network) is not None:
        seconds = network.collective(primitive, members, stride, sent)
        return seconds, seconds
    if figures.cores is None:
        seconds = link.collective(primitive, members, sent)
        return seconds, seconds
    # Devices that share cores share memory. For sums they add pairs in a tree, and copy nothing.
    if primitive != "all_reduce":
        return link.seconds(sent), link.seconds(sent)
    pair = link.seconds(reduced_bytes(members, sent))
    return math.ceil(math.log2(members)) * pair, (members - 1) / members * pair


def even_costs(costs: Costs, number: int) -> Costs:
    """Returns the costs of equal stages with the same total work, without transfers."""
    durations = costs.per_stage(number).durations()
    return Costs(**{FIELD_OF[kind]: sum(each) / number for kind, each in durations.items()})


def device_memory(stages: Stages, figures: Figures, place: int) -> float:
    """Returns the maximum bytes of one device at an index along `layers`."""
    # Weights and the optimizer's share exist all the time. Sums of gradients exist from the first
    # `B` or `W` of a stage on, which frees kept values as it makes them. An action needs working
    # memory while it runs. So does the update after the last action.
    # Slices may differ in length: one for each.
    by_slice = [
        {
            stage: StageMemory(dataclasses.replace(stages, rows=stages.slice_rows(piece)), stage)
            for stage, owner in enumerate(stages.table.stage_devices)
            if owner == place
        }
        for piece in range(max(1, len(stages.spans)))
    ]
    memory_by_stage = by_slice[0]
    apart = stages.table.recomputed()
    past = sum(memory.past for of_slice in by_slice for memory in of_slice.values())
    # By stage, kind, mode, whether there are no sums yet, and slice: the needed bytes and the held
    # ones.
    known: dict[tuple[int, str, ModeName, bool, int], tuple[float, float]] = {}
    summed: set[int] = set()
    held = most = 0.0
    for action in stages.table.rows[place]:
        stage, kind = action.stage, action.kind
        pair = stage, action.microbatch
        mode = stages.modes[pair]
        if pair in apart:
            # An `R` of the table has recomputed all of it before the backward pass begins.
            mode = "none" if kind in "BIW" else "full"
        is_first = stage not in summed
        number = action.microbatch % len(by_slice)
        if (key := (stage, kind, mode, is_first, number)) not in known:
            stage_memory = by_slice[number][stage]
            known[key] = stage_memory.needs(kind, mode, is_first), stage_memory.leaves(kind, mode)
        needed, left = known[key]
        most = max(most, held + needed)
        held += left
        if kind in "BW" and is_first:
            summed.add(stage)
            held += stages.trained(stage)
    weights, trained = (sum(map(of, memory_by_stage)) for of in (stages.weights, stages.trained))
    states = sum(stages.states(stage, figures.optimizer) for stage in memory_by_stage)
    states = weights * (1 + stages.cast) + states / stages.replicas
    # Each replica updates its share.
    update = trained * (1 + (figures.update_memory - 1) / stages.replicas)
    return states + max(most + past, update)


class StageMemory:
    """The bytes of a stage's microbatch on one device: those held and those its actions need."""

    def __init__(self, stages: Stages, stage: int) -> None:
        layers, rows = stages.layers[stage], stages.rows
        shared = stages.groups[stage], stages.rules
        self._sums = [layer.trained_bytes * stages.held_part(stage, layer) for layer in layers]
        # Of each layer: what it keeps for its backward pass, and what it needs while it computes.
        # What it hands on to later slices is shared by them. Its gradient is of whole sequences.
        own = [layer.hands_on(rows, *shared) for layer in layers]
        self.past = sum(own) if stages.slices > 1 else 0.0
        self.kept = [layer.holds(rows, *shared) for layer in layers]
        self._pending = [layer.holds(rows, *shared, pending=True) for layer in layers]
        self.working = [
            layer.working.at(rows) * stages.part(stage, layer) if layer.working else 0.0
            for layer in layers
        ]
        self._given = stages.passed(stage - 1) if stage else 0.0
        # Every action has all weights of its stage, fetched for it or once for all.
        self._fetched = stages.fetched(stage)

    def _left(self, kind: str, mode: ModeName) -> float:
        """Returns the bytes of a microbatch that are held after its `F`, `R` or `I`."""
        if kind == "R" or (kind == "F" and mode == "none"):
            return sum(self.kept)
        if kind == "F":
            return self._given + self.past
        # Half of the values that a `W` needs are gradients. The other half are results of the
        # forward pass, which a `W` that recomputes does not need.
        return self._given + sum(self._pending) / 2 if mode == "twice" else sum(self._pending)

    def leaves(self, kind: str, mode: ModeName) -> float:
        """Returns the bytes that an action adds to those held, without gradient sums."""
        before = {"F": 0.0, "W": self._left("I", mode)}.get(kind, self._left("F", mode))
        return (self._left(kind, mode) if kind in "FRI" else 0.0) - before

    def needs(self, kind: str, mode: ModeName, is_first: bool) -> float:
        """Returns the bytes that an action needs beside those held when it begins."""
        return self._fetched + self._computing(kind, mode, is_first)

    def _computing(self, kind: str, mode: ModeName, is_first: bool) -> float:
        """Returns those without the weights that it fetches."""
        # Without the gradients of weights: if there are no sums to add to, they become the sums.
        less = [max(0.0, w - s) for w, s in zip(self.working, self._sums, strict=True)]
        # An action that recomputes its stage also has all of the results meanwhile.
        again = max(0.0, sum(self.kept) - self._left("F", mode))
        if kind in "FR":
            return max(0.0, self.leaves(kind, mode)) + max(less)
        if kind == "I":
            pairs = zip(self._pending, self.kept, strict=True)
            return again + self._backward([], [max(0.0, p - k) for p, k in pairs], less)
        freed = self.kept if kind == "B" else self._pending
        if kind == "W":
            again = max(0.0, sum(self._pending) - self._left("I", mode)) if mode == "twice" else 0.0
        made, working = (self._sums, less) if is_first else ([], self.working)
        return again + self._backward(freed, made, working)

    @staticmethod
    def _backward(freed: Sequence[float], made: Sequence[float], working: Sequence[float]) -> float:
        """Returns the maximum while a pass goes from the last layer to the first."""
        # The weight matmuls of a layer wait while the layer before it begins, so two layers work at
        # a time, and neither frees anything. `freed` and `made` are bytes that each layer frees and
        # adds at its end.
        most = changed = 0.0
        for i in reversed(range(len(working))):
            grown = made[i] if made else 0.0
            most = max(most, changed + grown + sum(working[max(0, i - 1) : i + 1]))
            changed += grown - (freed[i] if freed else 0.0)
        return most
