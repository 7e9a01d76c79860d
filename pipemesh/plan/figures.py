"""Figures: measured times and bytes of a model's layers on a machine, stored in a file."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules
from pipemesh.partition import LayerCost
from pipemesh.plan.homes import cut_rules, inner_rules
from pipemesh.plan.network import Link, sent_share
from pipemesh.plan.plan import Plan
from pipemesh.plan.remat import Remat
from pipemesh.plan.slices import Progress

# Kinds of action; a + marks one that recomputes the forward pass first.
KINDS = ("F", "B", "I", "W", "B+", "I+", "W+")
# Curves that a layer, and its shares, may lack.
_OPTIONAL, _WHOLE = ("working", "pending", "past"), ("whole", "pending_whole")
# Axis names of the plans that the search makes, and of the rules that figures know.
DATA, MODEL = "data", "model"


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity as a piecewise linear function of the rows of a microbatch."""

    # Beyond the last point the steeper of two lines continues: the last segment, or the line from
    # the first point to the last, because two points alone are unreliable. It never falls. Before
    # the first point the higher of two lines continues: the first segment, or the line through the
    # origin. A single point defines a line through the origin.

    # Pairs of rows and the quantity, in ascending order of rows.
    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        points = tuple((float(x), float(y)) for x, y in self.points)
        if not points or any(not (math.isfinite(x + y) and x > 0 and y >= 0) for x, y in points):
            raise PlanError(
                f"a curve has the points {points}; it must have some, of rows above 0 and numbers "
                "from 0 on"
            )
        if any(a[0] >= b[0] for a, b in itertools.pairwise(points)):
            raise PlanError(f"a curve has the points {points}; their rows must rise")
        object.__setattr__(self, "points", points)

    def at(self, rows: float) -> float:
        """Returns the quantity for a number of rows."""
        points = self.points
        if len(points) == 1:
            return points[0][1] * rows / points[0][0]
        place = bisect.bisect_left(points, (rows, 0.0))
        (x, y), (end, then) = points[min(max(place, 1), len(points) - 1) - 1 :][:2]
        slope = (then - y) / (end - x)
        if rows > end:
            mean = (then - points[0][1]) / (end - points[0][0])
            return then + max(slope, mean, 0.0) * (rows - end)
        value = y + slope * (rows - x)
        return max(value, y * rows / x) if rows < x else value

    def rising(self) -> Curve:
        """Returns the least-squares nearest curve that never falls."""
        # Isotonic regression: Barlow, Bartholomew, Bremner, Brunk, "Statistical inference under
        # order restrictions", 1972.
        # Neighbours that fall form a block: their mean and their number.
        blocks: list[tuple[float, int]] = []
        for _, value in self.points:
            mean, size = value, 1
            while blocks and blocks[-1][0] > mean:
                before, count = blocks.pop()
                mean, size = (before * count + mean * size) / (count + size), count + size
            blocks.append((mean, size))
        values = [mean for mean, size in blocks for _ in range(size)]
        return Curve(tuple((x, y) for (x, _), y in zip(self.points, values, strict=True)))

    def scaled(self, factor: float) -> Curve:
        """Returns the curve times a factor."""
        return Curve(tuple((x, y * factor) for x, y in self.points))


@dataclasses.dataclass(frozen=True)
class Collective:
    """The calls of a primitive of `pipemesh.lowering` in a layer, for one microbatch."""

    primitive: str
    backward: bool  # in the backward pass
    calls: float
    # Bytes of the tensors of all calls, on all devices together unless they are equal there.
    size: Curve

    def sent(self, members: int, rows: float) -> float:
        """Returns the bytes that each of some devices sends in a call."""
        size = self.size.at(rows) / self.calls
        return _share_of_all(self.primitive, members) * size


def _share_of_all(primitive: str, members: int) -> float:
    """Returns the share of the whole tensor that one of some devices sends."""
    is_split = primitive in ("all_gather", "all_to_all")
    return float(sent_share(primitive, members) / (members if is_split else 1))


def collective_of(
    primitive: str, backward: bool, calls: float, sent: Curve, members: int
) -> Collective:
    """Returns the calls in which each of some members sends so many bytes together."""
    return Collective(
        primitive, backward, calls, sent.scaled(1 / _share_of_all(primitive, members))
    )


@dataclasses.dataclass(frozen=True)
class Shares:
    """The parts of a layer on devices that share it by layout rules; the rest is whole on each."""

    most: int = 1  # Any divisor of this number of devices can share the layer.
    sent: tuple[Collective, ...] = ()
    # Shares that are split: of the layer's work, of the bytes of its weights, and of its outputs.
    work: float = 1.0
    weights: float = 1.0
    outputs: float = 0.0
    cut: float = 0.0  # Share of the bytes of a device's weights that is cut over replicas.
    replicas: int = 1  # Any divisor of this number of replicas can cut them.
    # Kept bytes, and bytes between an `I` and its `W`, that each device has completely.
    whole: Curve | None = None
    pending_whole: Curve | None = None

    def among(self, devices: int) -> int:
        """Returns the number of devices that share the layer."""
        return min(devices, self.most)

    def part(self, devices: int, split: float) -> float:
        """Returns the part of one device of something of which a share is split."""
        return 1 - split + split / self.among(devices)


_UNSPLIT = Shares()


def all_reduces(most: int, summed: Curve | None, number: int = 1, **more: Any) -> Shares:
    """Returns the shares of a layer that is split completely, with a number of all-reduces of
    `summed` bytes together in its forward pass, and as many in its backward pass.
    """
    passes = (False, True) if summed else ()
    sent = tuple(
        Collective("all_reduce", backward, number, summed) for backward in passes if summed
    )
    return Shares(most, sent, **more)


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """The times of one layer by kind of action (`KINDS`), and its bytes."""

    name: str
    # On one device; made `Curve.rising`, since more rows never take less time.
    seconds: Mapping[str, Curve]
    parameter_bytes: int  # weights
    kept: Curve  # Bytes of a microbatch that are kept for the backward pass without recomputation.
    outputs: Curve  # bytes passed to the next layer
    # By layout rules (`Figures.layouts`), the parts of devices that share it; "" is for
    # `Figures.rules`.
    shares: Mapping[str, Shares] = dataclasses.field(default_factory=dict[str, Shares])
    working: Curve | None = None  # Bytes that an action needs while it runs, besides the kept ones.
    # Bytes kept between an `I` and its `W`; by default those of `kept`.
    pending: Curve | None = None
    # Core seconds of all cores of the device, empty if unknown. More than `seconds` if independent
    # operations run at once.
    work: Mapping[str, Curve] = dataclasses.field(default_factory=dict[str, Curve])
    # Share of its forward pass that is recomputed if it is the last layer of its stage: a backward
    # pass does not need values that are only passed on.
    again: float = 1.0
    # Bytes of the optimizer's state per byte of its trained weights; by default that of all layers.
    optimizer: float | None = None
    # Share of the bytes of its weights that is trained: gradients, state and updates are of these.
    trained: float = 1.0
    # Bytes of a microbatch that it hands on from slice to slice of sequences, such as keys.
    past: Curve | None = None
    # Flops of equal parts of a row, first to last: with causal attention later ones take more.
    # Empty if all take the same.
    row_work: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for curves in (self.seconds, self.work or self.seconds):
            kinds = set(curves)
            if unknown := sorted(kinds - set(KINDS)):
                raise PlanError(f"layer {self.name!r} has times of {unknown}; kinds are {KINDS}")
            if "F" not in kinds or not ("B" in kinds or {"I", "W"} <= kinds):
                raise PlanError(
                    f"layer {self.name!r} has times of {sorted(kinds)}; it needs that of F, and "
                    "that of B or those of I and W"
                )
        rising = {kind: curve.rising() for kind, curve in self.seconds.items()}
        object.__setattr__(self, "seconds", rising)

    @property
    def trained_bytes(self) -> float:
        """Returns the bytes of its weights that are trained."""
        return self.parameter_bytes * self.trained

    def takes(self, kind: str, rows: float, again: bool = False) -> float:
        """Returns the seconds of an action on one device, with recomputation on demand."""
        # Missing kinds follow from the others: a `B` is an `I` and a `W`, each of these is half a
        # `B`, and recomputation adds an `F` to the first action of a backward pass.
        return _at(self.seconds, kind, rows, again)

    def computes(self, kind: str, rows: float, again: bool = False) -> float:
        """Returns the core seconds that an action computes on a device; `takes` if unknown."""
        return _at(self.work or self.seconds, kind, rows, again)

    def shared(self, rules: str) -> Shares:
        """Returns the parts of devices under layout rules of `Figures.layouts`."""
        return self.shares.get(rules, _UNSPLIT)

    def part(self, rules: str, devices: int) -> float:
        """Returns the part of the layer's work of each of some devices under layout rules."""
        shares = self.shared(rules)
        return shares.part(devices, shares.work)

    def hands_on(self, rows: float, devices: int = 1, rules: str = "") -> float:
        """Returns the bytes that each of the sharing devices hands on to a later slice."""
        return self.past.at(rows) / self.shared(rules).among(devices) if self.past else 0.0

    def holds(self, rows: float, devices: int = 1, rules: str = "", pending: bool = False) -> float:
        """Returns the bytes of a microbatch that each of the sharing devices keeps."""
        shares = self.shared(rules)
        curve, whole = self.kept, shares.whole
        if pending and self.pending is not None:
            curve, whole = self.pending, shares.pending_whole
        held = curve.at(rows)
        alike = min(held, whole.at(rows)) if whole is not None else 0.0
        return alike + (held - alike) / shares.among(devices)

    def narrower(self, share: float) -> LayerFigures:
        """Returns the layer with values of a share of the bytes; seconds and weights stay."""

        def scaled(value: Any, names: Sequence[str]) -> Any:
            curves = {name: getattr(value, name) for name in names}
            less: Any = {name: curve and curve.scaled(share) for name, curve in curves.items()}
            return dataclasses.replace(value, **less)

        shares = {
            rules: dataclasses.replace(
                scaled(each, _WHOLE), sent=tuple(scaled(one, ["size"]) for one in each.sent)
            )
            for rules, each in self.shares.items()
        }
        narrow: LayerFigures = scaled(self, ("kept", "outputs", "pending", "past"))
        return dataclasses.replace(narrow, shares=shares)

    def faster(self, factor: float) -> LayerFigures:
        """Returns the layer on a device that computes faster by a factor."""
        if not (factor > 0 and math.isfinite(factor)):
            raise PlanError(f"a device is {factor} times as fast; it must be a number above 0")
        return dataclasses.replace(
            self,
            seconds={kind: curve.scaled(1 / factor) for kind, curve in self.seconds.items()},
            work={kind: curve.scaled(1 / factor) for kind, curve in self.work.items()},
        )


def _at(curves: Mapping[str, Curve], kind: str, rows: float, again: bool) -> float:
    if again and kind != "F":
        if (curve := curves.get(f"{kind}+")) is not None:
            return curve.at(rows)
        extra = 0.0 if kind == "W" else curves["F"].at(rows)
        return extra + _at(curves, kind, rows, False)
    if (curve := curves.get(kind)) is not None:
        return curve.at(rows)
    if kind == "B":
        return curves["I"].at(rows) + curves["W"].at(rows)
    return curves["B"].at(rows) / 2


def figures_of_costs(
    costs: Sequence[LayerCost], rows: float, *, split: int = 1, summed: Sequence[float] = ()
) -> list[LayerFigures]:
    """Returns figures of layers from costs for a single size of microbatch.

    Args:
        costs: in seconds and bytes, as `layer_costs` of `pipemesh.layers` computes them.
        rows: rows of the microbatch that the costs are for.
        split: number of devices that can share each layer with known sums.
        summed: for each layer the bytes of its forward all-reduce if it is split; 0 for a layer
            that cannot be split. Empty if unknown.

    Raises:
        PlanError: `summed` has another number of layers, or `rows` is not above 0.

    Example:
        >>> [layer] = figures_of_costs([LayerCost(2.0, name="a")], rows=4)
        >>> layer.takes("F", 8), layer.takes("B", 8)
        (4.0, 8.0)
    """
    if summed and len(summed) != len(costs):
        raise PlanError(f"sums are given of {len(summed)} layers, but there are {len(costs)}")

    sizes = summed or [0.0] * len(costs)

    def line(value: float) -> Curve:
        return Curve(((rows, value),))

    return [
        LayerFigures(
            name=cost.name or str(number),
            seconds={"F": line(cost.forward), "B": line(cost.backward_or_default)},
            parameter_bytes=int(cost.parameter_bytes),
            kept=line(cost.activation_bytes),
            outputs=line(cost.boundary_bytes),
            shares={"": all_reduces(split, line(size))} if (size := sizes[number]) else {},
        )
        for number, cost in enumerate(costs)
    ]


def layers_to_values(layers: Sequence[LayerFigures]) -> list[dict[str, Any]]:
    """Returns layers as JSON values."""

    def points(curve: Curve | None) -> Any:
        return None if curve is None else [list(point) for point in curve.points]

    def sent(each: Collective) -> list[Any]:
        return [each.primitive, each.backward, each.calls, points(each.size)]

    def shared(shares: Shares) -> dict[str, Any]:
        return {
            **{name: getattr(shares, name) for name in ("most", "replicas", *_SPLIT)},
            **{name: points(getattr(shares, name)) for name in _WHOLE},
            "sent": [sent(each) for each in shares.sent],
        }

    return [
        {
            "name": layer.name,
            "seconds": {kind: points(curve) for kind, curve in layer.seconds.items()},
            "work": {kind: points(curve) for kind, curve in layer.work.items()},
            **{
                name: getattr(layer, name)
                for name in ("parameter_bytes", "again", "optimizer", "trained", "row_work")
            },
            **{name: points(getattr(layer, name)) for name in ("kept", "outputs", *_OPTIONAL)},
            "shares": {rules: shared(shares) for rules, shares in layer.shares.items()},
        }
        for layer in layers
    ]


# Shares of a layer that are split or cut.
_SPLIT = ("work", "weights", "outputs", "cut")


def _curve(points: Any) -> Curve | None:
    return None if points is None else Curve(tuple((x, y) for x, y in points))


def _shares_of(layer: Any) -> dict[str, Shares]:
    """Reads the shares of a layer; older files have those of one set of rules, completely split."""
    if "shares" not in layer:
        most, summed = int(layer.get("split", 1)), _curve(layer.get("summed"))
        more = {name: _curve(layer.get(name)) for name in _WHOLE}
        if most == 1 and summed is None:
            return {}
        return {"": all_reduces(most, summed, int(layer.get("sums", 1)), **more)}

    def shared(values: Any) -> Shares:
        more: dict[str, Any] = {name: _curve(values[name]) for name in _WHOLE}
        more |= {name: float(values[name]) for name in _SPLIT}
        sent = tuple(
            Collective(primitive, bool(backward), calls, cast("Curve", _curve(size)))
            for primitive, backward, calls, size in values["sent"]
        )
        return Shares(int(values["most"]), sent, replicas=int(values["replicas"]), **more)

    return {str(rules): shared(values) for rules, values in layer["shares"].items()}


def layers_from_values(values: Any, source: str) -> list[LayerFigures]:
    """Reads the values that `layers_to_values` writes; `source` names them in errors."""
    try:
        return [
            LayerFigures(
                name=str(layer["name"]),
                seconds={kind: cast("Curve", _curve(p)) for kind, p in layer["seconds"].items()},
                parameter_bytes=int(layer["parameter_bytes"]),
                kept=cast("Curve", _curve(layer["kept"])),
                outputs=cast("Curve", _curve(layer["outputs"])),
                shares=_shares_of(layer),
                **{name: _curve(layer.get(name)) for name in _OPTIONAL},
                again=float(layer.get("again", 1.0)),
                trained=float(layer.get("trained", 1.0)),
                row_work=tuple(map(float, layer.get("row_work", ()))),
                optimizer=None if layer.get("optimizer") is None else float(layer["optimizer"]),
                work={kind: cast("Curve", _curve(p)) for kind, p in layer.get("work", {}).items()},
            )
            for layer in values
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise PlanError(f"{source}: {error}") from error
        raise PlanError(
            f"{source} has no figures of layers ({type(error).__name__}: {error}); write them with "
            "`pipemesh plan --save`"
        ) from error


FILE = "figures.json"
"""Name of the file with a model's measured figures in the log directory of a run."""

SETTINGS = (
    *("optimizer", "freeze", "train_only"),
    *("lora_rank", "lora_targets", "lora_dropout", "vocab_multiple", "sequence_length"),
)
"""Flags of a training that change what is measured."""


def settings_of(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Returns those of the given flags that are `SETTINGS`."""
    return {name: flags[name] for name in SETTINGS if name in flags}


PLAIN = Plan(remat=Remat.NONE)
"""The plan of a plain step: one device, one microbatch, no recomputation."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """A model's layers on a machine, and the other costs of a step.

    Attributes:
        layers: the layers, first to last.
        action: overhead of an action in seconds, besides its layers.
        fixed: seconds of a step that belong to no device: reading the batch, calling the graph.
        update: seconds of the optimizer per byte of trained weights.
        optimizer: bytes of its state per byte of trained weights.
        transfer: the link between two devices of the machine.
        cores: cores that the devices share; None if each device has enough of its own.
        loads: by kind of action, the cores that one action keeps busy when it runs alone; 1 for
            missing kinds.
        rules: dims of a layer that devices can share, as layout rules such as `heads:model`; "" for
            none.
        batch: rows of a batch of the model; 0 if unknown.
        about: describes the model and the machine of the measurement.
        sums: the link between devices that share a layer; None for `transfer`. Its times include
            all extra work of sharing, such as work that each device does completely.
        crowding: 0 to 1; the loss between devices whose threads share a core while another core
            idles; see `pipemesh.schedule.simulate`.
        update_memory: peak bytes of an update per byte of trained weights, gradients included; at
            least 1.
        plain_step: seconds of a step of `PLAIN` at the time of the measurement; 0 if unknown. Its
            later time shows the machine's speed then; see `at_pace`.
        settings: flags that the model was measured with; see `settings_of`.
        alike: indices of the first and behind the last of the layers that `lowering=simd` runs in a
            loop, which are alike; (0, 0) if there are none.
        loop_pace: the seconds of that program for each second of the same layers in actions; ticks
            copy activations and wait for the slowest device.
        error: mean relative error of the forecasts of those steps that were measured with the
            figures; 0 if unknown.
        positions: positions of a row, such as tokens, if each layer can be given slices of it, as
            the schedule seq1f1b does; 0 if one cannot, or if unknown.

    Raises:
        PlanError: there are no layers, or a number is negative or not finite.

    Example:
        >>> layers = figures_of_costs([LayerCost(1.0, name="a")], rows=2)
        >>> figures = Figures(tuple(layers), action=1e-4, cores=2)
        >>> Figures.from_json(figures.to_json(), "text") == figures
        True
    """

    layers: tuple[LayerFigures, ...]
    action: float = 0.0
    fixed: float = 0.0
    update: float = 0.0
    optimizer: float = 2.0
    transfer: Link = dataclasses.field(default_factory=lambda: Link(0.0, math.inf))
    cores: float | None = None
    loads: Mapping[str, float] = dataclasses.field(default_factory=dict[str, float])
    rules: str = ""
    batch: int = 0
    about: str = ""
    sums: Link | None = None
    crowding: float = 0.0
    update_memory: float = 1.0
    plain_step: float = 0.0
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict[str, Any])
    alike: tuple[int, int] = (0, 0)
    loop_pace: float = 1.0
    error: float = 0.0
    positions: int = 0

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("figures are of no layer; there must be one at least")
        for name in ("action", "fixed", "update", "optimizer", "plain_step", "error"):
            number = getattr(self, name)
            if not (math.isfinite(number) and number >= 0):
                raise PlanError(f"{name} is {number}; it must be a number from 0 on")
        if not (math.isfinite(self.update_memory) and self.update_memory >= 1):
            raise PlanError(f"update_memory is {self.update_memory}; it must be a number from 1 on")
        if not 0 <= self.crowding <= 1:
            raise PlanError(f"crowding is {self.crowding}; it must be a number from 0 to 1")
        if self.cores is not None and not self.cores > 0:
            raise PlanError(f"cores are {self.cores}; there must be some")
        if not all(kind in "FBIW" and load >= 0 for kind, load in self.loads.items()):
            raise PlanError(f"loads are {self.loads}; each is of F, B, I or W, and 0 or more")
        if not 0 <= self.alike[0] <= self.alike[1] <= len(self.layers):
            raise PlanError(f"alike is {self.alike}; there are {len(self.layers)} layers")
        if not (math.isfinite(self.loop_pace) and self.loop_pace > 0):
            raise PlanError(f"loop_pace is {self.loop_pace}; it must be a number above 0")

    @functools.cached_property
    def row_progress(self) -> Progress:
        """Returns how the work of all layers grows along a row."""
        known = [layer.row_work for layer in self.layers if layer.row_work]
        return Progress([sum(parts) for parts in zip(*known, strict=True)])

    @functools.cached_property
    def layouts(self) -> tuple[str, ...]:
        """Returns the layout rules that layers have `shares` for; "" stands for `rules`.

        Their axes are `model`, for dims that devices of a replica share, and `data`, for dims of
        weights that are cut over replicas.
        """
        return tuple(dict.fromkeys(["", *(name for each in self.layers for name in each.shares)]))

    def layout_of(self, layout: LayoutRules) -> str | None:
        """Returns those of `layouts` that a plan's layout means; None if figures lack them."""
        rules = [f"{dim}:{MODEL}" for dim, _ in inner_rules(layout).rules]
        cut = [f"{dim}:{DATA}" for dim, _ in cut_rules(layout).rules]
        if not (wanted := {*rules, *cut}) or wanted == set(self.rules.split(";")):
            return ""
        return next((name for name in self.layouts if set(name.split(";")) == wanted), None)

    @functools.cached_property
    def end_layouts(self) -> tuple[str, ...]:
        """Returns those of `layouts` that split layers before or behind the alike ones alone, whose
        dims `lowering=simd` can split over `layers` too.
        """
        begin, end = self.alike
        ends = {name for each in (*self.layers[:begin], *self.layers[end:]) for name in each.shares}
        return tuple(
            layout
            for layout in self.layouts
            if layout in ends
            and begin < end
            and not cuts_weights(layout)
            and not any(layout in each.shares for each in self.layers[begin:end])
        )

    def can_cut(self, replicas: int, layout: str) -> bool:
        """Returns whether a number of replicas can each have a slice of the weights they cut."""
        numbers = [
            each.replicas for each in (layer.shared(layout) for layer in self.layers) if each.cut
        ]
        return not numbers or (replicas > 1 and not math.gcd(*numbers) % replicas)

    def can_share(self, devices: int, layout: str = "") -> bool:
        """Returns whether a number of devices can each have a slice of every divisible layer."""
        if devices == 1:
            return layout == "" or not splits_layers(layout)
        shares = [layer.shared(layout) for layer in self.layers]
        most = [each.most for each in shares if each.most > 1 or each.sent]
        rules = layout or self.rules
        return bool(most and splits_layers(rules) and not math.gcd(*most) % devices)

    def of_layers(self, numbers: Sequence[int]) -> Figures:
        """Returns the figures of a model that has some of the layers alone."""
        layers = tuple(self.layers[number] for number in numbers)
        return dataclasses.replace(self, layers=layers, alike=(0, 0))

    def at_pace(self, plain_step: float) -> Figures:
        """Returns the figures scaled to the current speed of the machine.

        All seconds change by one factor. The speed of machines drifts by 5% to 15% within hours,
        because of other programs and of clock rates.

        Args:
            plain_step: seconds that a step of `PLAIN` takes now.

        Raises:
            PlanError: `plain_step` is not above 0, or these figures lack theirs.
        """
        if not (math.isfinite(plain_step) and plain_step > 0 and self.plain_step > 0):
            raise PlanError(
                f"a plain step took {self.plain_step} s when figures were measured and "
                f"{plain_step} s now; both must be above 0 to say how much slower the machine is"
            )
        factor = plain_step / self.plain_step

        def slower(link: Link) -> Link:
            return Link(link.latency * factor, link.bandwidth / factor)

        return dataclasses.replace(
            self,
            layers=tuple(layer.faster(1 / factor) for layer in self.layers),
            action=self.action * factor,
            fixed=self.fixed * factor,
            update=self.update * factor,
            transfer=slower(self.transfer),
            sums=self.sums and slower(self.sums),
            plain_step=plain_step,
        )

    def to_json(self) -> str:
        """Returns all figures as a JSON object."""
        values = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if field.name not in ("layers", "transfer", "sums")
        }
        values["transfer"] = _link_values(self.transfer)
        values["sums"] = self.sums and _link_values(self.sums)
        values["layers"] = layers_to_values(self.layers)
        return json.dumps(values, indent=1)

    @classmethod
    def read(cls, path: str, rows: float = 1.0) -> Figures:
        """Reads a file of figures, or of costs of layers for `rows` of them; see `from_json`.

        Raises:
            PlanError: the file is unreadable or malformed.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(
                f"{path} cannot be read: {error.strerror}; give a file that `pipemesh plan "
                "--model=package.module.Class --save=FILE` wrote"
            ) from error
        return cls.from_json(text, path, rows)

    @classmethod
    def from_json(cls, text: str, source: str, rows: float = 1.0) -> Figures:
        """Reads the output of `to_json`, or a list of costs of layers.

        Args:
            text: JSON: an object, or a list of objects with the fields of
                `pipemesh.partition.LayerCost`, in seconds and bytes.
            source: the name of the file in errors.
            rows: rows of the microbatch that a list of costs is for.

        Raises:
            PlanError: the text is malformed.
        """
        try:
            content: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"{source} is no JSON: {error}") from error
        if isinstance(content, list):
            return cls(tuple(_of_costs(cast("list[Any]", content), source, rows)))
        if not isinstance(content, dict):
            raise PlanError(f"{source} is {content!r}; it must be a JSON object or a list of costs")
        values = cast("dict[str, Any]", content)
        # Older files have it; `crowding` replaces it.
        values.pop("handover", None)
        if unknown := sorted(set(values) - {"layers", *_READERS}):
            raise PlanError(f"{source}: {unknown[0]!r} is nothing that figures have")
        layers = tuple(layers_from_values(values.pop("layers", []), source))
        try:
            return cls(layers, **{name: _READERS[name](value) for name, value in values.items()})
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(f"{source}: {error}") from error


def splits_layers(layout: str) -> bool:
    """Returns whether one of `Figures.layouts` has rules for devices of a replica."""
    return any(axis != DATA for _, axis in LayoutRules.from_text(layout).rules)


def cuts_weights(layout: str) -> bool:
    """Returns whether one of `Figures.layouts` cuts weights over replicas."""
    return any(axis == DATA for _, axis in LayoutRules.from_text(layout).rules)


def _link_values(link: Link) -> list[float | None]:
    return [link.latency, link.bandwidth if link.bandwidth < math.inf else None]


def _link_of(values: Any) -> Link:
    latency, bandwidth = values
    return Link(latency, math.inf if bandwidth is None else bandwidth)


# By a field of `Figures` besides the layers, the function that reads its JSON value.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("action", "fixed", "update", "optimizer", "crowding"), float),
    **dict.fromkeys(("update_memory", "plain_step", "loop_pace", "error"), float),
    "transfer": _link_of,
    "sums": lambda values: values and _link_of(values),
    "cores": lambda cores: None if cores is None else float(cores),
    "loads": lambda loads: {str(kind): float(load) for kind, load in loads.items()},
    "rules": str,
    **dict.fromkeys(("batch", "positions"), int),
    "about": str,
    "settings": dict,
    "alike": lambda alike: (int(alike[0]), int(alike[1])),
}


def _of_costs(values: list[Any], source: str, rows: float) -> list[LayerFigures]:
    try:
        costs = [LayerCost(**value) for value in values]
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{source} is no list of costs ({error}); each is an object with forward, backward, "
            "parameter_bytes, activation_bytes, boundary_bytes and name"
        ) from error
    return figures_of_costs(costs, rows)
