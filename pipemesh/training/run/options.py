"""What a training is asked for, whatever is trained, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# How many held-out batches are evaluated while training, unless a number is asked for.
EVAL_BATCHES = 16
# What standard output has: lines for people, or an object of JSON a line.
LOG_FORMATS = ("text", "json")
# Skips the step, or ends training.
ON_NONFINITE = ("skip", "stop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What a training is asked for.

    Attributes:
        logdir: the log directory.
        steps: the step to train up to.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations.
        eval_batches: held-out batches of every evaluation; None for `EVAL_BATCHES` while training
            and all at the end.
        max_to_keep: how many of the newest checkpoints to keep.
        keep_best: how many of the best to keep besides, by the held-out data.
        on_nonfinite: what to do with a step whose loss or gradients are not finite, one of
            `ON_NONFINITE`.
        early_stop: after how many evaluations while training that are no better than the best
            before them training ends; 0 for never.
        given: the flags that were given, by name, to be kept with checkpoints.
        trace_schedule: whether to time the actions of a step at the end.
        find_learning_rate: the number of learning rates to try instead of training; 0 to train.
        log_format: one of `LOG_FORMATS`.
        profile_steps: the first and the last step to profile; None for none.
        histogram_every: steps between histograms of weights and their updates; 0 for none.
        figures: path of what was measured of the model's layers; None for `figures.json` in the
            log directory, if that is there.
        device_memory: bytes of a device; None if that is not said.

    Example:
        >>> Options(logdir="runs/a", steps=300).save_every
        100
    """

    logdir: str
    steps: int
    save_every: int = 100
    eval_every: int = 100
    eval_batches: int | None = None
    max_to_keep: int = 3
    keep_best: int = 0
    on_nonfinite: str = "skip"
    early_stop: int = 0
    given: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    trace_schedule: bool = False
    find_learning_rate: int = 0
    log_format: str = "text"
    profile_steps: tuple[int, int] | None = None
    histogram_every: int = 0
    figures: str | None = None
    device_memory: float | None = None
