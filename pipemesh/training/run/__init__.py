"""Settings of a run, independent of the model, as plain values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

# Default number of held-out batches for an evaluation during the run.
EVAL_BATCHES = 16
# Formats of standard output: text, or one JSON object per line.
LOG_FORMATS = ("text", "json")
# The tracker of runs for which none is chosen.
TRACKER = "tensorboard"
# Who reads batches.
READERS = ("client", "workers")
# Skip the step, or end the run.
ON_NONFINITE = ("skip", "stop")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a run.

    Attributes:
        logdir: the log directory.
        steps: the step to train up to.
        read_data: who reads the data, one of `READERS`: this process, or the worker of the first
            stage.
        steps_per_call: most steps in one call of the graph. A call ends where something else is
            due.
        save_every: steps between checkpoints.
        eval_every: steps between evaluations.
        eval_batches: held-out batches of each evaluation; None for `EVAL_BATCHES` during the run
            and all at the end.
        max_to_keep: number of newest checkpoints to keep.
        keep_best: number of checkpoints with the best held-out score to keep in addition.
        on_nonfinite: how to treat a step whose loss or gradients are not finite, one of
            `ON_NONFINITE`.
        early_stop: number of evaluations without improvement after which the run ends; 0 for never.
        given: the flags on the command line, by name, stored with checkpoints.
        trace_schedule: whether to time the actions of a step at the end.
        find_learning_rate: number of learning rates to try instead of training; 0 to train.
        log_format: one of `LOG_FORMATS`.
        profile_steps: the first and the last step to profile; None for none.
        histogram_every: steps between histograms of weights and updates; 0 for none.
        trackers: names of trackers of experiments.
        figures: path of measured figures of the layers; None for `figures.json` in the log
            directory, if it exists.
        device_memory: bytes of a device; None if unknown.

    Example:
        >>> Options(logdir="runs/a", steps=300).save_every
        100
    """

    logdir: str
    steps: int
    read_data: str = "client"
    steps_per_call: int = 1
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
    trackers: tuple[str, ...] = (TRACKER,)
    figures: str | None = None
    device_memory: float | None = None
