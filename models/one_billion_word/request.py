"""What a training is asked for, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from models.one_billion_word.sizes import Settings
from pipemesh.plan import Plan

# How many held-out batches are evaluated while training, unless a number is asked for.
EVAL_BATCHES = 16
# Skips the step, or ends training.
ON_NONFINITE = ("skip", "stop")


@dataclasses.dataclass(frozen=True)
class Request:
    """What a training is asked for.

    Attributes:
        model: name of the configuration.
        settings: its settings, with all that is asked for otherwise.
        device_type: `CPU` or `GPU`.
        logdir: the log directory.
        steps: the step to train up to.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations.
        eval_batches: held-out batches of every evaluation; None for `EVAL_BATCHES` while training
            and all at the end.
        other_text: whether to go on from a checkpoint with other text than it was trained on.
        max_to_keep: how many of the newest checkpoints to keep.
        keep_best: how many of the best to keep besides, by the held-out text.
        on_nonfinite: what to do with a step whose loss or gradients are not finite, one of
            `ON_NONFINITE`.
        given: the flags that were given, by name, to be kept with checkpoints.
        trace_schedule: whether to time the actions of a step at the end.
    """

    model: str
    settings: Settings
    device_type: str
    logdir: str
    steps: int
    save_every: int = 100
    eval_every: int = 100
    eval_batches: int | None = None
    other_text: bool = False
    trace_schedule: bool = False
    on_nonfinite: str = "skip"
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    max_to_keep: int = 3
    keep_best: int = 0

    @property
    def plan(self) -> Plan:
        """How it is run, as far as it is chosen."""
        return self.settings.PLAN
