"""Figures: measured times and bytes of a model's layers on a machine, stored in a file."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan.network import Link
from pipemesh.plan.plan import Plan
from pipemesh.plan.remat import Remat

# Kinds of action; a + marks one that recomputes the forward pass first.
KINDS = ("F", "B", "I", "W", "B+", "I+", "W+")
# Curves that a layer may lack.
_OPTIONAL = ("summed", "working", "whole", "pending", "pending_whole")


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
class LayerFigures:
    """The times of one layer by kind of action (`KINDS`), and its bytes."""

    name: str
    # On one device; made `Curve.rising`, since more rows never take less time.
    seconds: Mapping[str, Curve]
    parameter_bytes: int  # weights
    kept: Curve  # Bytes of a microbatch that are kept for the backward pass without recomputation.
    outputs: Curve  # bytes passed to the next layer
    # Bytes of the all-reduce in its forward pass if devices share the layer, and again in its
    # backward pass.
    summed: Curve | None = None
    sums: int = 1  # number of all-reduces that these bytes are divided among
    split: int = 1  # Can be split among any divisor of this number of devices.
    working: Curve | None = None  # Bytes that an action needs while it runs, besides the kept ones.
    whole: Curve | None = None  # Kept bytes that each sharing device has completely.
    # Bytes kept between an `I` and its `W`; by default those of `kept`.
    pending: Curve | None = None
    pending_whole: Curve | None = None
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

    def holds(self, rows: float, shared: int, pending: bool = False) -> float:
        """Returns the bytes of a microbatch that each of the sharing devices keeps."""
        curve, whole = self.kept, self.whole
        if pending and self.pending is not None:
            curve, whole = self.pending, self.pending_whole
        held = curve.at(rows)
        alike = min(held, whole.at(rows)) if whole is not None else 0.0
        return alike + (held - alike) / shared

    def narrower(self, share: float) -> LayerFigures:
        """Returns the layer with values of a share of the bytes; seconds and weights stay."""
        bytes_of = ("kept", "outputs", "summed", "whole", "pending", "pending_whole")
        curves: dict[str, Curve | None] = {name: getattr(self, name) for name in bytes_of}
        scaled: Any = {name: curve and curve.scaled(share) for name, curve in curves.items()}
        return dataclasses.replace(self, **scaled)

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

    def line(value: float) -> Curve:
        return Curve(((rows, value),))

    return [
        LayerFigures(
            name=cost.name or str(number),
            seconds={"F": line(cost.forward), "B": line(cost.backward_or_default)},
            parameter_bytes=int(cost.parameter_bytes),
            kept=line(cost.activation_bytes),
            outputs=line(cost.boundary_bytes),
            summed=line(summed[number]) if summed and summed[number] else None,
            split=split if summed and summed[number] else 1,
        )
        for number, cost in enumerate(costs)
    ]


def layers_to_values(layers: Sequence[LayerFigures]) -> list[dict[str, Any]]:
    """Returns layers as JSON values."""

    def points(curve: Curve | None) -> Any:
        return None if curve is None else [list(point) for point in curve.points]

    return [
        {
            "name": layer.name,
            "seconds": {kind: points(curve) for kind, curve in layer.seconds.items()},
            "work": {kind: points(curve) for kind, curve in layer.work.items()},
            **{
                name: getattr(layer, name)
                for name in ("parameter_bytes", "sums", "split", "again", "optimizer", "trained")
            },
            **{name: points(getattr(layer, name)) for name in ("kept", "outputs", *_OPTIONAL)},
        }
        for layer in layers
    ]


def layers_from_values(values: Any, source: str) -> list[LayerFigures]:
    """Reads the values that `layers_to_values` writes; `source` names them in errors."""

    def curve(points: Any) -> Curve | None:
        return None if points is None else Curve(tuple((x, y) for x, y in points))

    try:
        return [
            LayerFigures(
                name=str(layer["name"]),
                seconds={kind: cast("Curve", curve(p)) for kind, p in layer["seconds"].items()},
                parameter_bytes=int(layer["parameter_bytes"]),
                kept=cast("Curve", curve(layer["kept"])),
                outputs=cast("Curve", curve(layer["outputs"])),
                sums=int(layer.get("sums", 1)),
                split=int(layer.get("split", 1)),
                **{name: curve(layer.get(name)) for name in _OPTIONAL},
                again=float(layer.get("again", 1.0)),
                trained=float(layer.get("trained", 1.0)),
                optimizer=None if layer.get("optimizer") is None else float(layer["optimizer"]),
                work={kind: cast("Curve", curve(p)) for kind, p in layer.get("work", {}).items()},
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

    def __post_init__(self) -> None:
        if not self.layers:
            raise PlanError("figures are of no layer; there must be one at least")
        for name in ("action", "fixed", "update", "optimizer", "plain_step"):
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

    def can_share(self, devices: int) -> bool:
        """Returns whether a number of devices can each have a slice of every divisible layer."""
        splits = [
            layer.split for layer in self.layers if layer.split > 1 or layer.summed is not None
        ]
        return devices == 1 or bool(self.rules and splits and not math.gcd(*splits) % devices)

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


def _link_values(link: Link) -> list[float | None]:
    return [link.latency, link.bandwidth if link.bandwidth < math.inf else None]


def _link_of(values: Any) -> Link:
    latency, bandwidth = values
    return Link(latency, math.inf if bandwidth is None else bandwidth)


# By a field of `Figures` besides the layers, the function that reads its JSON value.
_READERS: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("action", "fixed", "update", "optimizer", "crowding"), float),
    **dict.fromkeys(("update_memory", "plain_step"), float),
    "transfer": _link_of,
    "sums": lambda values: values and _link_of(values),
    "cores": lambda cores: None if cores is None else float(cores),
    "loads": lambda loads: {str(kind): float(load) for kind, load in loads.items()},
    "rules": str,
    "batch": int,
    "about": str,
    "settings": dict,
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
