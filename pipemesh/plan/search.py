"""Search for the best plan, the nearest one that fits, and one for fewer devices."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from pipemesh.errors import PartitionError, PipemeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.mesh.checks import whole_number
from pipemesh.mesh.mesh import LAYERS_AXIS
from pipemesh.partition import LayerCost, partition
from pipemesh.plan.figures import DATA, MODEL, Figures, cuts_weights
from pipemesh.plan.homes import BATCH
from pipemesh.plan.network import Link, Network
from pipemesh.plan.plan import Plan, divisors
from pipemesh.plan.predict import Prediction, predict
from pipemesh.plan.remat import Remat
from pipemesh.plan.stages import evenly_cut, layer_seconds, stages_of
from pipemesh.schedule import simulate
from pipemesh.schedule.names import EQUAL_WORK, FILE, SEARCHED, parse
from pipemesh.text import bytes_of

SCHEDULES = (
    "1f1b",
    "gpipe",
    "zb_h1",
    "zb_h2",
    "interleaved:2",
    "zb_v",
    "v_half",
    "v_min",
    "dual_pipe_v",
)
# Those with slices of sequences, for models whose layers can be given them.
_SLICED = ("seq1f1b:2", "seq1f1b:4")


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The plans that a search may return.

    Attributes:
        devices: number of devices; a plan may use fewer.
        batch: rows of a batch.
        memory: bytes of a device, also as text such as `80GB`; None for no limit.
        fixed: fixed values of the plan, as in `Plan.to_values`.
        schedules: names of the schedules to try; if they are the default ones, also seq1f1b, which
            cuts sequences into slices, where the figures say that all layers can be given them:
            slices of equal length, and of equal work where later positions take more.

    Raises:
        PlanError: a number is invalid.

    Example:
        >>> SearchSpace(devices=8, batch=64, memory="16GiB").memory
        17179869184.0
    """

    devices: int
    batch: int
    memory: float | None = None
    fixed: Mapping[str, str] = dataclasses.field(default_factory=dict[str, str])
    schedules: Sequence[str] = SCHEDULES

    def __post_init__(self) -> None:
        for name in ("devices", "batch"):
            number = whole_number(value := getattr(self, name))
            if number is None or number < 1:
                raise PlanError(f"{name} is {value!r}; it must be a whole number from 1 on")
            object.__setattr__(self, name, number)
        if self.memory is not None:
            object.__setattr__(self, "memory", memory_of(self.memory))


def memory_of(value: object) -> float:
    """Returns the bytes of a device from a number or a text such as `80GB`."""
    try:
        size = bytes_of(value) if isinstance(value, str) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise PlanError(f"memory is {value!r}: {error}") from error
    if not (math.isfinite(size) and size > 0):
        raise PlanError(f"memory is {value!r}; it must be a number of bytes above 0")
    return size


@dataclasses.dataclass(frozen=True)
class Split:
    """The division of a run among devices, and their schedule."""

    layers: int  # size of the axis `layers`
    data: int = 1  # replicas
    model: int = 1  # devices that share each layer
    schedule: str = "1f1b"
    num_microbatches: int = 1
    remat: Remat = Remat.NONE
    layout: str = ""  # how devices share each layer, of `Figures.layouts`
    lowering: str = "placement"
    ends: str = ""  # of `Figures.end_layouts`: the dims that `lowering=simd` splits over `layers`

    @property
    def num_devices(self) -> int:
        """Returns the number of devices of the mesh."""
        return self.layers * self.data * self.model

    @property
    def mesh(self) -> str:
        """Returns the mesh as text."""
        axes = ((LAYERS_AXIS, self.layers), (DATA, self.data), (MODEL, self.model))
        return ";".join(f"{name}:{size}" for name, size in axes if size > 1 or name == LAYERS_AXIS)

    def rules(self, figures: Figures) -> str:
        """Returns the layout rules as text."""
        rows = f"{BATCH}:{DATA}" if self.data > 1 else ""
        inner = self.layout or (figures.rules * (self.model > 1))
        over = [dim for dim, _ in LayoutRules.from_text(self.ends).rules]
        # A dim has one rule.
        kept = [rule for rule in inner.split(";") if rule.partition(":")[0] not in over]
        stages = [f"{dim}:{LAYERS_AXIS}" for dim in over]
        return ";".join(filter(None, [rows, *kept, *stages]))

    def plan(self, figures: Figures, space: SearchSpace) -> Plan:
        """Returns the plan, without boundaries unless they are fixed; invalid ones are errors."""
        values = {
            "mesh": self.mesh,
            "layout": self.rules(figures),
            "schedule": self.schedule,
            "num_microbatches": str(self.num_microbatches),
            "remat": str(self.remat),
            "lowering": self.lowering,
        }
        return Plan.from_values(values | dict(space.fixed))


def candidates(figures: Figures, space: SearchSpace) -> Iterator[Split]:
    """Yields all splits of a search, or raises an error for malformed fixed values."""
    fixed = space.fixed
    count = len(figures.layers)
    tried = tuple(space.schedules)
    if tried == SCHEDULES and figures.positions:
        tried += tuple(name for name in _SLICED if not figures.positions % _division(name)[1])
        if not figures.row_progress.is_even:
            tried += tuple(
                f"{name}:{EQUAL_WORK}"
                for name in _SLICED
                if figures.positions >= _division(name)[1]
            )
    fixed_number = fixed.get("num_microbatches", "")
    for places, replicas, group, layout in _meshes(figures, space):
        rest = space.batch // replicas
        # `Plan` reports the errors of other values.
        is_number = fixed_number.isdecimal() and int(fixed_number) > 0
        numbers = [int(fixed_number)] if is_number else divisors(rest)
        yield from _programs(figures, space, (places, replicas, group, layout), numbers)
        if fixed.get("lowering") == "simd":
            continue
        schedules = tried if places > 1 else ("1f1b",)
        if "schedule" in fixed:
            schedules = (fixed["schedule"],)
        remats = (Remat.NONE, Remat.FULL)
        if "remat" in fixed:
            remats = (Remat.from_text(fixed["remat"]),)
        for schedule in schedules:
            if "mesh" not in fixed and places * _division(schedule)[0] > count:
                continue
            for number in numbers:
                for remat in remats:
                    yield Split(places, replicas, group, schedule, number, remat, layout)


def _programs(
    figures: Figures,
    space: SearchSpace,
    split: tuple[int, int, int, str],
    numbers: Sequence[int],
) -> Iterator[Split]:
    """Yields the splits of a mesh and its layout that run as one program."""
    places, replicas, group, layout = split
    fixed, count = space.fixed, figures.alike[1] - figures.alike[0]
    schedules = [
        schedule
        for schedule, rounds in (("gpipe", 1), ("looped_bfs:2", 2))
        if count and not count % (places * rounds) and (places > 1 or rounds == 1)
    ]
    if "schedule" in fixed:
        schedules = [fixed["schedule"]]
    if fixed.get("lowering") == "simd":
        # `predict` reports what is wrong.
        schedules = schedules or ["gpipe"]
    elif (
        "lowering" in fixed
        or not count
        or places == 1
        or cuts_weights(layout)
        or fixed.get("schedule", "gpipe").partition(":")[0] not in ("gpipe", "looped_bfs")
        or fixed.get("remat", "full") != "full"
    ):
        return
    # The rules of a fixed layout are all there are.
    ends = ["", *(figures.end_layouts if places > 1 and "layout" not in fixed else ())]
    for schedule, number, over in itertools.product(schedules, numbers, ends):
        yield Split(places, replicas, group, schedule, number, Remat.FULL, layout, "simd", over)


def _division(schedule: str) -> tuple[int, int]:
    """Returns the stages of a device, and the slices of a sequence."""
    if schedule.startswith("table:"):
        return 1, 1
    parsed = parse(schedule)
    return (1, 1) if parsed.name in (FILE, SEARCHED) else (parsed.stages(), parsed.slices())


def _meshes(figures: Figures, space: SearchSpace) -> Iterator[tuple[int, int, int, str]]:
    """Yields the sizes of the axes for stages, replicas and slices of all meshes, and layouts."""
    given = LayoutRules.from_text(space.fixed.get("layout", ""))
    if "mesh" in space.fixed:
        # `Plan` checks the combination and reports errors.
        plan = Plan.from_values(
            {n: v for n, v in space.fixed.items() if n in ("mesh", "layout", "allow_idle")}
        )
        places, replicas = plan.mesh.num_stages, plan.num_replicas
        if plan.mesh.num_devices > space.devices:
            raise PlanError(
                f"mesh '{plan.mesh}' has {plan.mesh.num_devices} devices, but there are "
                f"{space.devices}; use a smaller mesh, or more devices"
            )
        group = plan.mesh.num_devices // places // replicas
        yield places, replicas, group, figures.layout_of(given) or ""
        return
    check_fixed(space.fixed)
    named = {axis for _, axis in given.rules} - {LAYERS_AXIS}
    # Weights that are cut over replicas save memory alone.
    layouts = [
        layout for layout in figures.layouts if not cuts_weights(layout) or space.memory is not None
    ]
    if given.rules:
        layouts = [figures.layout_of(given) or ""]
    groups = [
        (group, layout)
        for group in range(1, space.devices + 1)
        for layout in layouts
        if figures.can_share(group, layout)
    ]
    for places in range(1, min(space.devices, len(figures.layers)) + 1):
        for replicas in divisors(space.batch):
            for group, layout in groups:
                if replicas * group * places > space.devices:
                    continue
                axes = {axis for axis, size in ((DATA, replicas), (MODEL, group)) if size > 1}
                if given.rules and named != axes:
                    continue
                if figures.can_cut(replicas, layout):
                    yield places, replicas, group, layout


def check_fixed(fixed: Mapping[str, str]) -> None:
    """Checks that fixed layout rules without a mesh name the axes of the search; it needs no
    figures.
    """
    given = LayoutRules.from_text(fixed.get("layout", ""))
    known = (LAYERS_AXIS, DATA, MODEL)
    if "mesh" not in fixed and (odd := [axis for _, axis in given.rules if axis not in known]):
        raise PlanError(
            f"layout={given} names the axis '{odd[0]}', and without a mesh the axes are "
            f"{', '.join(known)}; name one of these, or fix the mesh as well, such as "
            f"mesh=layers:1;{odd[0]}:2"
        )


def rated(figures: Figures, space: SearchSpace) -> list[Split]:
    """Returns all candidates in the order of `rough_seconds`, those that cannot fit last."""
    rough, least = rough_seconds(figures, space.batch), least_bytes(figures)
    limit = math.inf if space.memory is None else space.memory

    def seconds(split: Split) -> float:
        if split.lowering == "placement":
            return rough(split)
        # One program needs no simulation, so its forecast is a formula too.
        try:
            plan = evenly_cut(split.plan(figures, space), figures, space.batch)
            return predict(plan, figures, space.batch, parts=False).seconds
        except PipemeshError:
            return math.inf

    return sorted(
        candidates(figures, space), key=lambda split: (least(split) > limit, seconds(split))
    )


class _Slices(NamedTuple):
    """The bytes of a device's slices of all weights, with one stage and one replica."""

    weights: float
    cut: float  # of those, the ones that replicas cut
    trained: float
    trained_cut: float
    states: float


def _slices(figures: Figures, layout: str, group: int) -> _Slices:
    rows: list[tuple[float, ...]] = []
    for layer in figures.layers:
        shares = layer.shared(layout)
        part = shares.part(group, shares.weights)
        weights, trained = layer.parameter_bytes * part, layer.trained_bytes * part
        state = figures.optimizer if layer.optimizer is None else layer.optimizer
        rows.append((weights, weights * shares.cut, trained, trained * shares.cut, trained * state))
    return _Slices(*map(sum, zip(*rows, strict=True)))


def least_bytes(figures: Figures) -> Callable[[Split], float]:
    """Returns a formula for a lower bound of the bytes of the fullest device."""
    slices_of = functools.cache(functools.partial(_slices, figures))

    def least(split: Split) -> float:
        slices = slices_of(split.layout, split.model)
        away = 1 - 1 / split.data
        update = slices.trained * (1 + (figures.update_memory - 1) / split.data)
        held = slices.weights - away * slices.cut + slices.states / split.data
        return (held + update) / split.layers

    return least


def rough_seconds(
    figures: Figures, batch: int, network: Network | None = None
) -> Callable[[Split], float]:
    """Returns a formula for the approximate time of a step with equal stages."""
    # The sum of a home's work (of all homes if devices share cores), the bubble of this kind of
    # schedule, transfers, sums, gradients and the update.

    def sent(link: Link, primitive: str, members: int, stride: int, size: float) -> float:
        if network is None:
            return link.collective(primitive, members, size)
        return network.collective(primitive, members, stride, size)

    slices_of = functools.cache(functools.partial(_slices, figures))

    @functools.cache
    def layers(
        rows: float, group: int, again: bool, layout: str
    ) -> tuple[float, float, float, float]:
        """Returns seconds of all layers, of the longest, and of sums, and the busy cores."""
        costs = layer_seconds(figures, rows, group, again, layout)
        sums = 0.0
        for layer in figures.layers:
            shares = layer.shared(layout)
            if (shared := shares.among(group)) > 1:
                link = figures.sums or figures.transfer
                for each in shares.sent:
                    times = each.calls * (2 if again and not each.backward else 1)
                    sums += times * sent(link, each.primitive, shared, 1, each.sent(shared, rows))
        if not any(layer.work for layer in figures.layers):
            return sum(costs), max(costs), sums, figures.loads.get("B", 1.0)
        core_seconds = sum(
            (layer.computes("F", rows) + layer.computes("B", rows, again))
            * layer.part(layout, group)
            for layer in figures.layers
        )
        return sum(costs), max(costs), sums, core_seconds / sum(costs) if core_seconds else 1.0

    def seconds(split: Split) -> float:
        virtual, sliced = _division(split.schedule)
        pieces = split.num_microbatches * sliced
        rows = batch / pieces / split.data
        again = not split.remat.is_none
        work, longest, sums, load = layers(rows, split.model, again, split.layout)
        slices = slices_of(split.layout, split.model)
        trained, cut = slices.trained / split.layers, slices.trained_cut / split.layers
        is_zero_bubble = split.schedule.startswith(("zb", "v_"))
        link = network.link(2 * split.data * split.model) if network else figures.transfer
        away = 1 - 1 / split.data
        fetch = sent(link, "all_gather", split.data, split.model, away * slices.cut) / split.layers
        # With several stages a device, actions fetch. Each home takes at least as long as the
        # longest layer.
        fetches = 2 * fetch if virtual > 1 else 0.0
        home = max((work + sums) / split.layers + fetches, longest)
        home += (3 if is_zero_bubble else 2) * virtual * figures.action
        total = pieces * home
        # Zero-bubble schedules fill their bubble with two thirds of the backward passes.
        length = total + (split.layers - 1) * home / (3 if is_zero_bubble else virtual)
        if figures.cores is not None:
            length = max(length, total * split.num_devices * load / figures.cores)
        passed = 2 * (split.layers - 1) * link.seconds(figures.layers[0].outputs.at(rows))
        copies = 2 * away * (trained - cut)
        gradients = sent(link, "all_reduce", split.data, split.model, copies)
        gradients += sent(link, "reduce_scatter", split.data, split.model, away * cut)
        before = fetch if virtual == 1 else 0.0
        return before + length + passed + gradients + trained * figures.update / split.data

    return seconds


# Number of memory limits that the partitioner gets in turn, from the loosest to the tightest.
_LIMITS = 8
# Other cuts are not tried if devices need more than this multiple of their memory on average: cuts
# change that little.
_HOPELESS = 1.25


def cut_to_fit(forecast: Prediction, figures: Figures, space: SearchSpace) -> Prediction:
    """Returns the first forecast with other cuts that fits into memory, else the leanest."""
    # The partitioner counts less exactly than the forecast. So it gets tighter limits until the
    # forecast fits, loosest first.
    if space.memory is None or fits(forecast, space) or not _has_cuts(forecast.plan):
        return forecast
    if sum(forecast.memory) > _HOPELESS * space.memory * len(forecast.memory):
        return forecast
    stages = stages_of(forecast.plan, figures, space.batch)
    costs = [
        LayerCost(
            forward=layer.takes("F", stages.rows) * (part := stages.part(stage, layer)),
            backward=layer.takes("B", stages.rows) * part,
            parameter_bytes=layer.parameter_bytes * stages.held_part(stage, layer),
            activation_bytes=layer.holds(stages.rows, stages.groups[stage], stages.rules),
            boundary_bytes=layer.outputs.at(stages.rows),
        )
        for stage, layers in enumerate(stages.layers)
        for layer in layers
    ]
    halves = any(action.kind == "W" for row in stages.table.rows for action in row)
    is_full = not halves and "none" not in stages.modes.values()
    facts = simulate(stages.table).for_partition()
    # Gradients, the copy in the dtype of computation, and the optimizer's state.
    beside_weights = 1 + stages.cast + figures.optimizer / stages.replicas
    leanest, tried = forecast, {forecast.plan.boundaries}
    for number in range(_LIMITS):
        try:
            cuts = partition(
                costs,
                forecast.plan.num_stages,
                memory_limit=space.memory * 2 ** ((_LIMITS - 3 - number) / 4),
                optimizer_bytes_per_parameter_byte=beside_weights,
                remat="full" if is_full else "none",
                **facts,
            ).boundaries
        except PartitionError:
            # Tighter limits cannot be met either.
            break
        if cuts in tried:
            continue
        tried.add(cuts)
        recut = _with_cuts(forecast, cuts, figures, space)
        if fits(recut, space):
            return recut
        leanest = min(leanest, recut, key=lambda candidate: max(candidate.memory))
    return leanest


def _has_cuts(plan: Plan) -> bool:
    """Returns whether a plan's layers may be cut in several ways."""
    return plan.num_stages > 1 and plan.lowering != "simd"


def fits(forecast: Prediction, space: SearchSpace) -> bool:
    """Returns whether a forecast fits into the memory of every device."""
    return space.memory is None or max(forecast.memory) <= space.memory


def with_better_cuts(
    best: Prediction, figures: Figures, space: SearchSpace, end: float
) -> Prediction:
    """Moves single layers across cuts while the step fits better or becomes shorter."""

    def rate(forecast: Prediction) -> tuple[float, float]:
        limit = space.memory
        return sum(max(0.0, m - limit) for m in forecast.memory) if limit else 0.0, forecast.seconds

    moved = _has_cuts(best.plan)
    while moved:
        moved = False
        cuts = best.plan.boundaries or ()
        for place in range(1, len(cuts) - 1):
            for by in (-1, 1):
                if time.monotonic() > end:
                    return best
                cut = cuts[place] + by
                if not cuts[place - 1] < cut < cuts[place + 1]:
                    continue
                moved_forecast = _with_cuts(
                    best, (*cuts[:place], cut, *cuts[place + 1 :]), figures, space
                )
                (over, seconds), (most, until) = rate(moved_forecast), rate(best)
                if over < most or (over == most and seconds < until * (1 - 1e-9)):
                    best, moved = moved_forecast, True
                    cuts = best.plan.boundaries or ()
    return best


def _with_cuts(
    forecast: Prediction, cuts: tuple[int, ...], figures: Figures, space: SearchSpace
) -> Prediction:
    plan = dataclasses.replace(forecast.plan, boundaries=cuts)
    return predict(plan, figures, space.batch, parts=False)


TRIALS = 4
"""Number of best plans whose steps are run: their forecasts differ by less than their error."""

# Share of the time for moving the cuts of the best plans.
_FOR_CUTS = 0.3
# Seconds to look for the nearest plan that fits.
_FOR_NEAREST = 20.0
# Number of plans whose cuts are moved.
_MOVED = 10
# Upper bound of the ratio between a plan's time with stages of equal seconds and with its best
# cuts.
_SLACK = 1.5


def search(
    figures: Figures, space: SearchSpace, *, seconds: float = 8.0, count: int = 10
) -> list[Prediction]:
    """Returns the shortest steps that fit into memory.

    A formula rates all combinations of mesh, layout, partition, schedule, microbatches and remat.
    They are simulated in that order until the time is over, or twice that time while none fits.
    Then layers move across the cuts of the best plans while that helps.

    Args:
        figures: figures of the model's layers on the machine.
        space: devices, batch, memory, and fixed values.
        seconds: limit of the search time.
        count: the maximum number of results.

    Returns:
        Forecasts, shortest first.

    Raises:
        PlanError: there is no plan, or none fits; the error names the leanest.
        PipemeshError: a fixed value is malformed.

    Example:
        >>> from pipemesh.partition import LayerCost
        >>> from pipemesh.plan import figures_of_costs
        >>> figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 4, rows=1)), action=0.1)
        >>> best = search(figures, SearchSpace(devices=4, batch=8))[0]
        >>> str(best.plan.mesh)
        'layers:1;data:4'
    """
    end = time.monotonic() + seconds
    fitting: list[Prediction] = []
    tight: list[Prediction] = []
    refused: PipemeshError | None = None
    for candidate in rated(figures, space):
        # If no plan fits yet, the search may take the same time again.
        if time.monotonic() > (end - _FOR_CUTS * seconds if fitting else end + seconds):
            break
        plan: Plan | None = None
        try:
            # Other cuts are hardly faster than those of equal seconds, so few are computed.
            until = sorted(_SLACK * forecast.seconds for forecast in fitting)[count - 1 : count]
            plan = candidate.plan(figures, space)
            forecast = _fitting(plan, figures, space, *until)
        except PipemeshError as error:
            # For example, a table for other numbers of microbatches. The error of a plan that can
            # be made says more.
            refused = error if refused is None or plan is not None else refused
            continue
        (fitting if fits(forecast, space) else tight).append(forecast)
    fitting, tight = _different(fitting), _different(tight)
    if "boundaries" not in space.fixed:
        for number, forecast in enumerate(fitting[:_MOVED]):
            fitting[number] = with_better_cuts(forecast, figures, space, end)
        last = end if fitting else max(end, time.monotonic() + seconds)
        fitting += _made_to_fit(fitting, tight, figures, space, last)
    if not fitting:
        leanest = min(tight, key=lambda forecast: max(forecast.memory), default=None)
        raise _nothing(figures, space, leanest, refused)
    return [
        predict(forecast.plan, figures, space.batch) for forecast in _different(fitting)[:count]
    ]


def _made_to_fit(
    fitting: list[Prediction],
    tight: list[Prediction],
    figures: Figures,
    space: SearchSpace,
    end: float,
) -> list[Prediction]:
    """Returns plans that fit with other cuts, if they may be faster than those that fit."""
    # `tight` are forecasts that do not fit, shortest step first.
    best = min((forecast.seconds for forecast in fitting), default=math.inf)
    made: list[Prediction] = []
    if not fitting:
        tight = sorted(tight, key=lambda forecast: max(forecast.memory))
    for forecast in tight:
        if forecast.seconds >= _SLACK * best or time.monotonic() > end:
            break
        moved = with_better_cuts(forecast, figures, space, end)
        if fits(moved, space):
            made.append(moved)
            best = min(best, moved.seconds)
    return made


def _fitting(
    plan: Plan, figures: Figures, space: SearchSpace, until: float = math.inf
) -> Prediction:
    """Returns the forecast of a plan, cut into stages of equal seconds, or to fit."""
    # From `until` seconds on, a plan that does not fit is of no interest.
    if plan.boundaries is not None:
        return predict(plan, figures, space.batch, parts=False)
    plan = evenly_cut(plan, figures, space.batch)
    forecast = predict(plan, figures, space.batch, parts=False)
    return cut_to_fit(forecast, figures, space) if forecast.seconds < until else forecast


def _different(forecasts: list[Prediction]) -> list[Prediction]:
    """Returns forecasts, shortest first, without equal tables under other names."""
    known: set[tuple[object, ...]] = set()
    kept: list[Prediction] = []
    for forecast in sorted(forecasts, key=lambda forecast: forecast.seconds):
        plan = forecast.plan
        key = (plan.mesh, plan.layout, plan.boundaries, plan.remat, plan.table, plan.lowering)
        if key not in known:
            known.add(key)
            kept.append(forecast)
    return kept


def nearest_that_fits(plan: Plan, figures: Figures, space: SearchSpace) -> Prediction:
    """Returns the plan that fits with the fewest changed values, and of those the fastest."""
    mine = plan.to_values()
    best: tuple[int, float] | None = None
    chosen: Prediction | None = None
    leanest: Prediction | None = None
    refused: PipemeshError | None = None
    end = time.monotonic() + _FOR_NEAREST
    for candidate in rated(figures, space):
        if time.monotonic() > end:
            break
        try:
            other = candidate.plan(figures, space)
            theirs = other.to_values()
            # The cuts follow from the other values.
            changes = sum(mine[n] != theirs[n] for n in mine if n not in ("boundaries", "layout"))
            if best is not None and changes > best[0]:
                continue
            forecast = _fitting(other, figures, space)
        except PipemeshError as error:
            refused = refused or error
            continue
        if not fits(forecast, space):
            if leanest is None or max(forecast.memory) < max(leanest.memory):
                leanest = forecast
        elif best is None or (changes, forecast.seconds) < best:
            best, chosen = (changes, forecast.seconds), forecast
    if chosen is None:
        raise _nothing(figures, space, leanest, refused)
    return predict(chosen.plan, figures, space.batch)


def _nothing(
    figures: Figures, space: SearchSpace, leanest: Prediction | None, refused: PipemeshError | None
) -> PlanError:
    if leanest is not None:
        return PlanError(
            f"no plan fits into {space.memory:,.0f} bytes a device, of those that were tried; the "
            f"one that needs least, {max(leanest.memory):,.0f}, is '{leanest.plan}'; use more "
            "devices or memory, a smaller batch, or fix less of the plan"
        )
    fixed = " ".join(f"{name}={text}" for name, text in space.fixed.items())
    return PlanError(
        f"no plan of {space.devices} devices, {len(figures.layers)} layers and {space.batch} rows"
        + (f" with {fixed}" if fixed else "")
        + (f": {refused}" if refused else "; use other numbers, or fix less of the plan")
    )


def fewer(plan: Plan, devices: int, check: Callable[[Plan], object] = lambda plan: None) -> Plan:
    """Returns the nearest plan that needs at most a number of devices."""
    # Axes only become shorter. A dim that is divisible by the old size of its axis is divisible by
    # each divisor of it. The mesh with the most devices wins, and of equal ones the leanest:
    # replicas of the batch are removed first, then stages. Boundaries go if the number of stages
    # changes. `check` raises a `PipemeshError` for a plan that the model cannot run; then the next
    # one is tried.
    if plan.mesh.num_devices <= devices:
        return plan
    if not plan.mesh.is_even:
        raise PlanError(
            f"mesh={plan.mesh}: its places have {plan.mesh.num_devices} devices of their own, and "
            f"{devices} are left; such a mesh is not made smaller, so give another one"
        )
    why = ""
    for mesh in _smaller(plan.mesh, plan.layout, devices):
        try:
            smaller = _with_mesh(plan, mesh)
            check(smaller)
        except PipemeshError as error:
            why = why or f"; with mesh={mesh}: {error}"
            continue
        return smaller
    raise PlanError(
        f"mesh={plan.mesh}: it has {plan.mesh.num_devices} devices, {devices} are left, and no "
        f"smaller mesh goes with the rest of the plan{why}"
    )


def _with_mesh(plan: Plan, mesh: Mesh) -> Plan:
    if isinstance(plan.schedule, str):
        kept = plan.boundaries if mesh.num_stages == plan.mesh.num_stages else None
        return dataclasses.replace(plan, mesh=mesh, boundaries=kept)
    # A table is for one number of homes.
    if mesh.num_stages != plan.mesh.num_stages:
        raise PlanError(f"the table of the schedule is for {plan.mesh.num_stages} places")
    return dataclasses.replace(plan, mesh=mesh)


def _smaller(mesh: Mesh, layout: LayoutRules, devices: int) -> Iterator[Mesh]:
    """Yields meshes with shorter axes, the best first."""
    batch = layout.axis(BATCH)
    sizes = [
        [size for size in range(1, most + 1) if name == LAYERS_AXIS or most % size == 0]
        for name, most in zip(mesh.axis_names, mesh.shape, strict=True)
    ]
    meshes: list[tuple[int, int, int, Mesh]] = []
    for shape in itertools.product(*sizes):
        if (count := math.prod(shape)) > devices:
            continue
        axes = tuple(zip(mesh.axis_names, shape, strict=True))
        replicas = math.prod(size for name, size in axes if name == batch)
        meshes.append((-count, replicas, -dict(axes).get(LAYERS_AXIS, 1), Mesh(axes)))
    return (rated[-1] for rated in sorted(meshes, key=lambda rated: rated[:-1]))
