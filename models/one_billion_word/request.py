"""What a training is asked for, as plain values."""

from __future__ import annotations

import dataclasses

from models.one_billion_word.sizes import Settings
from pipemesh.mesh import LayoutRules, Mesh

# How many held-out batches are evaluated while training, unless a number is asked for.
EVAL_BATCHES = 16


@dataclasses.dataclass(frozen=True)
class Request:
    """What a training is asked for.

    Attributes:
        model: name of the configuration.
        settings: its settings, with all that is asked for otherwise.
        mesh: the devices.
        layout: which axis of the mesh the batch is split over, if any.
        device_type: `CPU` or `GPU`.
        logdir: the log directory.
        steps: the step to train up to.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations.
        eval_batches: held-out batches of every evaluation; None for `EVAL_BATCHES` while training
            and all at the end.
        other_text: whether to go on from a checkpoint with other text than it was trained on.
        trace_schedule: whether to time the actions of a step at the end.
    """

    model: str
    settings: Settings
    mesh: Mesh
    layout: LayoutRules
    device_type: str
    logdir: str
    steps: int
    save_every: int = 100
    eval_every: int = 100
    eval_batches: int | None = None
    other_text: bool = False
    trace_schedule: bool = False

    @property
    def devices(self) -> str:
        """Mesh, layout and kind of devices in one line."""
        layout = f" {self.layout}" if self.layout.rules else ""
        return f"{self.mesh}{layout} {self.device_type}"

    @property
    def replicas(self) -> int:
        """How many replicas each stage has."""
        return replicas(self.mesh, self.layout)


def replicas(mesh: Mesh, layout: LayoutRules) -> int:
    """How many replicas each stage has under a layout."""
    axis = layout.axis("batch")
    return 1 if axis is None else mesh.size(axis)
