"""What was measured of a model on a machine, as one value: kept in a file, read back."""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, cast

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan.layer_figures import (
    LayerFigures,
    figures_of_costs,
    layers_from_values,
    layers_to_values,
)
from pipemesh.plan.network import Link
from pipemesh.plan.plan import Plan

FILE = "figures.json"
"""What was measured of a model, in the log directory of a training."""

PLAIN = Plan(remat="none")
"""The plan of a plain step: one device, one microbatch, nothing is computed again."""


@dataclasses.dataclass(frozen=True)
class Figures:
    """A model's layers on a machine, and what a step takes besides.

    Attributes:
        layers: first to last.
        action: seconds that an action takes beside its layers.
        fixed: seconds of a step that belong to no device: reading the batch, calling the graph.
        update: seconds for each byte of weights that an optimizer takes.
        optimizer: bytes of its state for each byte of weights.
        transfer: what joins two devices of the machine.
        cores: that devices share; None if each has all that it needs.
        loads: by kind of action the cores that one on one device keeps busy when it is alone; 1
            where nothing is said.
        rules: what of a layer devices can share, as rules of a layout such as `heads:model`; ""
            if nothing.
        batch: rows that a batch of the model has; 0 if that is not known.
        about: what was measured, and where.
        sums: what joins devices that share a layer, as if sums took all that they compute besides,
            what each of them computes whole included; None if it is `transfer`.
        crowding: from 0 to 1 how much devices lose to each other because threads share a core while
            another one idles; see `pipemesh.schedule.simulate`.
        update_memory: bytes that an update needs at once for each byte of weights, gradients
            included; at least 1.
        plain_step: seconds that a step of `PLAIN` took when all this was measured; 0 if that is not
            known. What it takes later says how fast the machine is then; see `at_pace`.

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
        """Whether so many devices can have a slice each of every layer that can be split.

        Args:
            devices: at least 1.

        Example:
            >>> layers = figures_of_costs([LayerCost(1.0)] * 2, 1, split=6, summed=[8.0, 0.0])
            >>> figures = Figures(tuple(layers), rules="heads:model")
            >>> [n for n in range(1, 7) if figures.can_share(n)]
            [1, 2, 3, 6]
        """
        splits = [
            layer.split for layer in self.layers if layer.split > 1 or layer.summed is not None
        ]
        return devices == 1 or bool(self.rules and splits and not math.gcd(*splits) % devices)

    def at_pace(self, plain_step: float) -> Figures:
        """The same of a machine that has become faster or slower: all seconds by one factor.

        Machines do, by 5% to 15% from one hour to another: other programs, other clock rates.

        Args:
            plain_step: seconds that a step of `PLAIN` takes now.

        Raises:
            PlanError: it is not above 0, or is not known of these figures.

        Example:
            >>> then = Figures(tuple(figures_of_costs([LayerCost(1.0)], rows=2)), plain_step=4.0)
            >>> then.at_pace(5.0).layers[0].takes("F", 2)
            1.25
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
        """All of it, as a JSON object."""
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
        """Reads a file of figures, or of costs of layers; see `from_json`.

        Args:
            path: of the file.
            rows: of a microbatch, that a list of costs is for.

        Raises:
            PlanError: it cannot be read, or is malformed.
        """
        try:
            text = pathlib.Path(path).read_text(encoding="utf-8")
        except OSError as error:
            raise PlanError(f"{path} cannot be read: {error.strerror}") from error
        return cls.from_json(text, path, rows)

    @classmethod
    def from_json(cls, text: str, source: str, rows: float = 1.0) -> Figures:
        """Reads what `to_json` writes, or a list of costs of layers.

        Args:
            text: JSON: an object, or a list of objects with the fields of
                `pipemesh.partition.LayerCost`, in seconds and bytes.
            source: what messages call the file.
            rows: of a microbatch, that a list of costs is for.

        Raises:
            PlanError: it is malformed.
        """
        try:
            found: Any = json.loads(text)
        except ValueError as error:
            raise PlanError(f"{source} is no JSON: {error}") from error
        if isinstance(found, list):
            return cls(tuple(_of_costs(cast("list[Any]", found), source, rows)))
        if not isinstance(found, dict):
            raise PlanError(f"{source} is {found!r}; it must be a JSON object or a list of costs")
        values = cast("dict[str, Any]", found)
        # What older files have, and `crowding` says better.
        values.pop("handover", None)
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(values) - known):
            raise PlanError(f"{source}: {unknown[0]!r} is nothing that figures have")
        layers = tuple(layers_from_values(values.get("layers", []), source))
        try:
            numbers = {
                name: float(values[name])
                for name in (
                    *("action", "fixed", "update", "optimizer"),
                    *("crowding", "update_memory", "plain_step"),
                )
                if name in values
            }
            sums = values.get("sums")
            cores, loads = values.get("cores"), values.get("loads", {})
            return cls(
                layers,
                **numbers,
                transfer=_link_of(values.get("transfer", (0.0, None))),
                sums=sums and _link_of(sums),
                cores=None if cores is None else float(cores),
                loads={str(kind): float(load) for kind, load in loads.items()},
                rules=str(values.get("rules", "")),
                batch=int(values.get("batch", 0)),
                about=str(values.get("about", "")),
            )
        except (AttributeError, TypeError, ValueError) as error:
            raise PlanError(f"{source}: {error}") from error


def _link_values(link: Link) -> list[float | None]:
    return [link.latency, link.bandwidth if link.bandwidth < math.inf else None]


def _link_of(values: Any) -> Link:
    latency, bandwidth = values
    return Link(latency, math.inf if bandwidth is None else bandwidth)


def _of_costs(values: list[Any], source: str, rows: float) -> list[LayerFigures]:
    try:
        costs = [LayerCost(**value) for value in values]
    except (TypeError, ValueError) as error:
        raise PlanError(
            f"{source} is no list of costs ({error}); each is an object with forward, backward, "
            "parameter_bytes, activation_bytes, boundary_bytes and name"
        ) from error
    return figures_of_costs(costs, rows)
