"""What was measured of layers: the figures that forecasts are made of."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost

# Kinds of action; those with a + compute the forward pass again first.
KINDS = ("F", "B", "I", "W", "B+", "I+", "W+")


@dataclasses.dataclass(frozen=True)
class Curve:
    """A quantity that depends on the rows of a microbatch, as straight lines through points.

    Beyond the last point the last line goes on, or the one from the first point to the last if that
    is steeper, as two points alone say little; it never falls. Before the first point the first
    line goes on, or the one through the origin if that is above it. A single point is on a line
    through the origin.

    Attributes:
        points: pairs of rows and the quantity, rows rising.

    Raises:
        PlanError: there is no point, rows do not rise, or a number is negative or not finite.

    Example:
        >>> Curve(((1, 3.0), (2, 4.0), (4, 8.0))).at(3), Curve(((4, 8.0),)).at(1)
        (6.0, 2.0)
        >>> Curve(((1, 3.0), (2, 4.0), (4, 8.0))).at(8)
        16.0
    """

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
        """The quantity for so many rows.

        Args:
            rows: above 0.
        """
        points = self.points
        if len(points) == 1:
            return points[0][1] * rows / points[0][0]
        place = bisect.bisect_left(points, (rows, 0.0))
        (x, y), (end, then) = points[min(max(place, 1), len(points) - 1) - 1 :][:2]
        slope = (then - y) / (end - x)
        if rows > end:
            mean = (then - points[0][1]) / (end - points[0][0])
            return then + max(slope, mean, 0.0) * (rows - end)
        found = y + slope * (rows - x)
        return max(found, y * rows / x) if rows < x else found

    def rising(self) -> Curve:
        """The nearest curve, by least squares, that never falls.

        Where values fall, all points from one to the other get their mean (isotonic regression:
        Barlow, Bartholomew, Bremner, Brunk, "Statistical inference under order restrictions",
        1972).

        Example:
            >>> Curve(((1, 1.0), (8, 5.0), (16, 4.0))).rising().points
            ((1.0, 1.0), (8.0, 4.5), (16.0, 4.5))
        """
        # Neighbours that fall form a block: their mean, and how many they are.
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
        """So many times the quantity, for all rows.

        Args:
            factor: not below 0.
        """
        return Curve(tuple((x, y * factor) for x, y in self.points))


@dataclasses.dataclass(frozen=True)
class LayerFigures:
    """What one layer takes and holds.

    Attributes:
        name: of the layer.
        seconds: by kind of action, one of `KINDS`, what it takes on one device. More rows never
            take less, so these curves are made `Curve.rising`.
        parameter_bytes: of its weights.
        kept: bytes that it keeps of a microbatch for its backward pass, if nothing is computed
            again.
        outputs: bytes that it hands to the next layer.
        summed: bytes that devices add up in its forward pass where it is split among them, and
            as many in its backward pass.
        sums: in how many sums they do.
        split: divisors of it are as many devices as it can be split among; 1 if it cannot.
        working: bytes that an action needs of it while it runs, beside what is kept.
        whole: bytes of what is kept that each of the devices has which share it.
        pending: bytes that it keeps between an `I` and its `W`; by default as many as are kept.
        pending_whole: as `whole`, of what is pending.
        work: by kind of action what all cores of the device together compute for it, in seconds;
            none if that is not known. It is more than `seconds` where operations that need
            nothing of each other run at once.
        again: the share of its forward pass that is computed again where it is the last of its
            stage; a backward pass does not need what is only handed on.

    Raises:
        PlanError: there is a kind of action that is none, or no time of `F` and of `B` or both
            `I` and `W`.
    """

    name: str
    seconds: Mapping[str, Curve]
    parameter_bytes: int
    kept: Curve
    outputs: Curve
    summed: Curve | None = None
    sums: int = 1
    split: int = 1
    working: Curve | None = None
    whole: Curve | None = None
    pending: Curve | None = None
    pending_whole: Curve | None = None
    work: Mapping[str, Curve] = dataclasses.field(default_factory=dict[str, Curve])
    again: float = 1.0

    def __post_init__(self) -> None:
        for curves in (self.seconds, self.work or self.seconds):
            there = set(curves)
            if unknown := sorted(there - set(KINDS)):
                raise PlanError(f"layer {self.name!r} has times of {unknown}; kinds are {KINDS}")
            if "F" not in there or not ("B" in there or {"I", "W"} <= there):
                raise PlanError(
                    f"layer {self.name!r} has times of {sorted(there)}; it needs that of F, and "
                    "that of B or those of I and W"
                )
        rising = {kind: curve.rising() for kind, curve in self.seconds.items()}
        object.__setattr__(self, "seconds", rising)

    def takes(self, kind: str, rows: float, again: bool = False) -> float:
        """What an action takes on one device, in seconds.

        What was not measured follows from what was: a `B` is an `I` and a `W`, each of these is
        half of it, and who computes again needs an `F` more, at the first of its actions.

        Args:
            kind: `F`, `B`, `I` or `W`.
            rows: of the microbatch.
            again: whether its forward pass is computed again.

        Example:
            >>> line = Curve(((1, 2.0),))
            >>> layer = LayerFigures("a", {"F": line, "B": line}, 0, line, line)
            >>> layer.takes("I", 3), layer.takes("B", 3, again=True)
            (3.0, 12.0)
        """
        return _at(self.seconds, kind, rows, again)

    def computes(self, kind: str, rows: float, again: bool = False) -> float:
        """What all cores of a device compute for an action, in seconds; `takes` if nothing is said.

        Args:
            kind: `F`, `B`, `I` or `W`.
            rows: of the microbatch.
            again: whether its forward pass is computed again.
        """
        return _at(self.work or self.seconds, kind, rows, again)

    def holds(self, rows: float, shared: int, pending: bool = False) -> float:
        """Bytes that one of the devices that share it keeps of a microbatch.

        Args:
            rows: of the microbatch.
            shared: among how many devices it is split.
            pending: whether between an `I` and its `W`, and not from `F` on.

        Example:
            >>> line, own = Curve(((1, 8.0),)), Curve(((1, 2.0),))
            >>> layer = LayerFigures("a", {"F": line, "B": line}, 0, line, line, whole=own)
            >>> layer.holds(1, shared=1), layer.holds(1, shared=2)
            (8.0, 5.0)
        """
        curve, whole = self.kept, self.whole
        if pending and self.pending is not None:
            curve, whole = self.pending, self.pending_whole
        found = curve.at(rows)
        alike = min(found, whole.at(rows)) if whole is not None else 0.0
        return alike + (found - alike) / shared

    def narrower(self, share: float) -> LayerFigures:
        """The same layer whose values take a share of the bytes; seconds and weights are as before.

        Args:
            share: above 0; 0.5 for values of two bytes where those measured have four.

        Example:
            >>> line = Curve(((1, 8.0),))
            >>> layer = LayerFigures("a", {"F": line, "B": line}, 0, line, line)
            >>> layer.narrower(0.5).holds(1, shared=1)
            4.0
        """
        bytes_of = ("kept", "outputs", "summed", "whole", "pending", "pending_whole")
        curves: dict[str, Curve | None] = {name: getattr(self, name) for name in bytes_of}
        scaled: Any = {name: curve and curve.scaled(share) for name, curve in curves.items()}
        return dataclasses.replace(self, **scaled)

    def faster(self, factor: float) -> LayerFigures:
        """The same layer on a device that computes so many times as fast.

        Args:
            factor: above 0.

        Raises:
            PlanError: it is not.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise PlanError(f"a device is {factor} times as fast; it must be a number above 0")
        return dataclasses.replace(
            self,
            seconds={kind: curve.scaled(1 / factor) for kind, curve in self.seconds.items()},
            work={kind: curve.scaled(1 / factor) for kind, curve in self.work.items()},
        )


def _at(curves: Mapping[str, Curve], kind: str, rows: float, again: bool) -> float:
    if again and kind != "F":
        if (own := curves.get(f"{kind}+")) is not None:
            return own.at(rows)
        extra = 0.0 if kind == "W" else curves["F"].at(rows)
        return extra + _at(curves, kind, rows, False)
    if (own := curves.get(kind)) is not None:
        return own.at(rows)
    if kind == "B":
        return curves["I"].at(rows) + curves["W"].at(rows)
    return curves["B"].at(rows) / 2


def figures_of_costs(
    costs: Sequence[LayerCost], rows: float, *, split: int = 1, summed: Sequence[float] = ()
) -> list[LayerFigures]:
    """Figures of layers whose costs are known for one size of microbatch.

    Args:
        costs: in seconds and bytes, as `layer_costs` of `pipemesh.layers` finds them.
        rows: that they are for.
        split: among how many devices each layer whose sums are known can be split.
        summed: for each layer the bytes that devices add up in its forward pass where it is
            split; none if they are not known, and 0 for a layer that cannot be split.

    Raises:
        PlanError: sums are known of another number of layers, or rows are not above 0.

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
    """Layers as JSON has them."""

    def points(curve: Curve | None) -> Any:
        return None if curve is None else [list(point) for point in curve.points]

    return [
        {
            "name": layer.name,
            "seconds": {kind: points(curve) for kind, curve in layer.seconds.items()},
            "parameter_bytes": layer.parameter_bytes,
            "kept": points(layer.kept),
            "outputs": points(layer.outputs),
            "summed": points(layer.summed),
            "sums": layer.sums,
            "split": layer.split,
            "working": points(layer.working),
            "whole": points(layer.whole),
            "pending": points(layer.pending),
            "pending_whole": points(layer.pending_whole),
            "again": layer.again,
            "work": {kind: points(curve) for kind, curve in layer.work.items()},
        }
        for layer in layers
    ]


def layers_from_values(values: Any, source: str) -> list[LayerFigures]:
    """Reads what `layers_to_values` writes.

    Args:
        values: of JSON.
        source: what messages call the file.

    Raises:
        PlanError: they are malformed.

    Example:
        >>> import json
        >>> layers = figures_of_costs([LayerCost(2.0, name="a")], rows=4)
        >>> layers_from_values(json.loads(json.dumps(layers_to_values(layers))), "x") == layers
        True
    """

    def curve(points: Any) -> Curve | None:
        return None if points is None else Curve(tuple((x, y) for x, y in points))

    try:
        return [
            LayerFigures(
                name=str(of["name"]),
                seconds={kind: cast("Curve", curve(p)) for kind, p in of["seconds"].items()},
                parameter_bytes=int(of["parameter_bytes"]),
                kept=cast("Curve", curve(of["kept"])),
                outputs=cast("Curve", curve(of["outputs"])),
                summed=curve(of.get("summed")),
                sums=int(of.get("sums", 1)),
                split=int(of.get("split", 1)),
                working=curve(of.get("working")),
                whole=curve(of.get("whole")),
                pending=curve(of.get("pending")),
                pending_whole=curve(of.get("pending_whole")),
                again=float(of.get("again", 1.0)),
                work={kind: cast("Curve", curve(p)) for kind, p in of.get("work", {}).items()},
            )
            for of in values
        ]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        if isinstance(error, PlanError):
            raise PlanError(f"{source}: {error}") from error
        raise PlanError(
            f"{source} has no figures of layers ({type(error).__name__}: {error}); write them with "
            "`pipemesh plan --save`"
        ) from error
