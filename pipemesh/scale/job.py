"""What is to be trained, on what: a model's figures, devices in hosts, a batch."""

from __future__ import annotations

import dataclasses
import functools

from pipemesh.errors import PlanError
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import LayerFigures
from pipemesh.plan.network import Network


@dataclasses.dataclass(frozen=True)
class Job:
    """A training that may run on any number of devices.

    Attributes:
        layers: figures of the layers, first to last.
        network: what joins the devices.
        batch: rows of a batch, whatever the number of devices.
        memory: bytes of a device; None for no limit.
        action: seconds that an action takes beside its layers.
        optimizer: bytes of its state for each byte of weights.
        update: seconds that it takes for each byte of weights.
        fixed: seconds of a step that belong to no device: reading the batch, calling the graph.
        update_memory: bytes that an update needs at once for each byte of weights; see `Figures`.

    Raises:
        PlanError: there are no layers, or no rows, or a number is out of range.
    """

    layers: tuple[LayerFigures, ...]
    network: Network
    batch: int
    memory: float | None = None
    action: float = 0.0
    optimizer: float = 2.0
    update: float = 0.0
    fixed: float = 0.0
    update_memory: float = 1.0

    def __post_init__(self) -> None:
        if not self.layers or self.batch < 1:
            raise PlanError(
                f"there are {len(self.layers)} layers and a batch of {self.batch} rows; there must "
                "be one of each at least"
            )
        if self.memory is not None and not self.memory > 0:
            raise PlanError(f"memory is {self.memory}; it must be a number of bytes above 0")
        # They are checked where they are used.
        _ = self.figures

    @functools.cached_property
    def figures(self) -> Figures:
        """The model on devices that each have their own cores, as `pipemesh.plan` takes it."""
        return Figures(
            self.layers,
            action=self.action,
            fixed=self.fixed,
            update=self.update,
            optimizer=self.optimizer,
            update_memory=self.update_memory,
        )

    @property
    def parameter_bytes(self) -> int:
        """Of all weights, once."""
        return sum(layer.parameter_bytes for layer in self.layers)


@dataclasses.dataclass(frozen=True)
class Split:
    """How devices share a training.

    Attributes:
        layers: places along the axis `layers`.
        data: replicas.
        model: devices that share each layer.
        schedule: by name.
        num_microbatches: of a batch.
        again: whether the backward pass computes the forward pass again.
    """

    layers: int
    data: int = 1
    model: int = 1
    schedule: str = "1f1b"
    num_microbatches: int = 1
    again: bool = False

    @property
    def num_devices(self) -> int:
        """All in all."""
        return self.layers * self.data * self.model

    @property
    def mesh(self) -> str:
        """The mesh, as text."""
        axes = (("layers", self.layers), ("data", self.data), ("model", self.model))
        shown = [f"{name}:{size}" for name, size in axes if size > 1 or name == "layers"]
        return ";".join(shown)
