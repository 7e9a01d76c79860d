"""The flags of a training, whatever is trained: how long, how often, where to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from types import ModuleType
from typing import Any

from absl import flags

from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.folder import path_of, steps_of
from pipemesh.errors import CheckpointError
from pipemesh.training.command import auto_plan, config, host_flags, plan_flags
from pipemesh.training.command.flags import FILES, TRAINING, FlagError, group
from pipemesh.training.run.options import EVAL_BATCHES, LOG_FORMATS, ON_NONFINITE

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

_OF_OPTIONS = (
    "steps",
    "save_every",
    "eval_every",
    "eval_batches",
    "early_stop",
    "trace_schedule",
    "find_learning_rate",
    "on_nonfinite",
    "max_to_keep",
    "keep_best",
    "log_format",
    "histogram_every",
)
# With fewer a step of the test is as large as the range that is looked for.
_FEWEST_RATES = 50
# Those that say where a training lies, or what is to be done this time.
_OF_A_CALL = (
    "logdir",
    "config",
    "other_text",
    "trace_schedule",
    "find_learning_rate",
    "log_format",
    "profile_steps",
    *auto_plan.NAMES,
    *host_flags.NAMES,
)
# Those that a program that does not train refuses.
OF_TRAINING = (*_OF_OPTIONS, "profile_steps")


@group(TRAINING)
def define(drawn: str = "the first ones") -> None:
    """Defines them.

    Args:
        drawn: which batches are a part of all held-out ones, in words.
    """
    auto_plan.define()
    flags.DEFINE_integer(
        "steps",
        300,
        "Train up to this step; a model's own p.train.max_steps is the default before this one.",
        lower_bound=0,
    )
    with group(FILES):
        flags.DEFINE_string("logdir", None, "Folder of checkpoints, summaries and the like.")
    flags.DEFINE_integer("eval_every", 100, "Evaluate every so many steps.", lower_bound=1)
    flags.DEFINE_integer(
        "eval_batches",
        None,
        f"Held-out batches to judge by, {drawn}; default: "
        f"{EVAL_BATCHES} while training, and all at the end.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "early_stop",
        0,
        "End training when so many evaluations in a row were no better than the best one before "
        "them; 0 for never.",
        lower_bound=0,
    )
    flags.DEFINE_integer("save_every", 100, "Save every so many steps.", lower_bound=1)
    flags.DEFINE_enum(
        "on_nonfinite",
        "skip",
        list(ON_NONFINITE),
        "What to do with a step whose loss or gradients are not finite: leave the weights as they "
        "are and go on with the next batch, or end training.",
    )
    flags.DEFINE_integer("max_to_keep", 3, "Keep so many of the newest checkpoints.", lower_bound=1)
    flags.DEFINE_integer(
        "keep_best",
        0,
        "Keep so many checkpoints besides, of those that were judged the best: of steps at which "
        "--eval_every and --save_every meet.",
        lower_bound=0,
    )
    flags.DEFINE_bool(
        "trace_schedule",
        False,
        "After training, six more steps that time every action; writes schedule.html and "
        "schedule_trace.json (chrome://tracing) into --logdir, predicted beside measured.",
    )
    flags.DEFINE_integer(
        "find_learning_rate",
        0,
        "Instead of training, try so many learning rates, each higher than the one before, 100 for "
        "example; say with which of them the model learns, and write learning_rates.csv into "
        "--logdir. No weights are saved.",
        lower_bound=0,
    )

    flags.DEFINE_enum(
        "log_format",
        "text",
        list(LOG_FORMATS),
        "What standard output has: lines for people, or for programs an object of JSON a line and "
        "nothing else, the same as record.jsonl in --logdir; text goes to standard error then.",
    )
    flags.DEFINE_integer(
        "histogram_every",
        0,
        "Write histograms for TensorBoard every so many steps, of each weight, its gradient and "
        "what the step changed it by; 0 for never.",
        lower_bound=0,
    )
    flags.DEFINE_string(
        "profile_steps",
        None,
        "Profile these steps with TensorFlow's profiler, such as 10:15, from the 10th to the 15th; "
        "TensorBoard shows plugins/profile in --logdir. The first step builds the graph.",
    )


def options() -> dict[str, Any]:
    """What of `Options` is asked for, but the log directory.

    Raises:
        FlagError: flags do not go together.
    """
    if 0 < FLAGS.find_learning_rate < _FEWEST_RATES:
        raise FlagError(
            f"--find_learning_rate={FLAGS.find_learning_rate}: so few say nothing; give "
            f"{_FEWEST_RATES} or more, such as 100, or 0 to train"
        )
    if FLAGS.find_learning_rate and FLAGS.trace_schedule:
        raise FlagError("--trace_schedule is for training; leave it or --find_learning_rate out")
    if FLAGS.find_learning_rate and FLAGS.log_format != "text":
        raise FlagError(
            f"--log_format={FLAGS.log_format} is for training; leave it or --find_learning_rate "
            "out (learning_rates.csv is for programs)"
        )
    found = {name: getattr(FLAGS, name) for name in _OF_OPTIONS}
    return {**found, "profile_steps": _profile_steps(), **auto_plan.options()}


def _profile_steps() -> tuple[int, int] | None:
    """The first and the last step to profile.

    Raises:
        FlagError: there are no such steps.
    """
    text = FLAGS.profile_steps
    if text is None:
        return None
    given = f"--profile_steps={text!r}"
    match = re.fullmatch(r"(\d{1,9}):(\d{1,9})", text, re.ASCII)
    if match is None:
        raise FlagError(f"{given}: give the first and the last step, such as 10:15")
    first, last = int(match[1]), int(match[2])
    if not 1 <= first <= last:
        raise FlagError(f"{given}: the first step is at least 1, and the last one not before it")
    if last > FLAGS.steps:
        raise FlagError(f"{given}: training ends at step {FLAGS.steps}; give more --steps")
    if FLAGS.find_learning_rate:
        raise FlagError(f"{given} is for training; leave it or --find_learning_rate out")
    return first, last


def given(program: ModuleType) -> dict[str, Any]:
    """The flags that were given and are to be kept with checkpoints, by name.

    Args:
        program: the module that they belong to.
    """
    found = config.given(program)
    return {name: value for name, value in found.items() if name not in _OF_A_CALL}


def newest_note(logdir: str) -> tuple[str | None, Mapping[str, Any]]:
    """Path and note of the newest checkpoint whose manifest can be read; None and {} if none can.

    Args:
        logdir: the folder of a training.
    """
    for step in reversed(steps_of(logdir)):
        path = path_of(logdir, step)
        # Whoever goes on from a damaged one says so.
        with contextlib.suppress(CheckpointError, OSError):
            return path, Manifest.read(path).note
    return None, {}


def take_up(
    logdir: str,
    program: ModuleType,
    checkpoint: str | None = None,
    leave: Collection[str] = (),
    tells: bool = True,
) -> dict[str, Any]:
    """Takes flags that are not given as the training was begun with, and says so.

    Args:
        logdir: the folder of the training.
        program: the module that the flags belong to.
        checkpoint: path of the one that says them; by default the newest of the folder.
        leave: flags that the program does not use.
        tells: whether the program prints what it took; one that does not continues or scores texts.

    Returns:
        Those that were taken.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if checkpoint:
        path, note = checkpoint, Manifest.read(checkpoint).note
    else:
        path, note = newest_note(logdir)
    known = set(config.names(program)).difference(leave)
    if FLAGS.plain and FLAGS["plain"].present:
        # What it was begun with is a pipeline's.
        known.difference_update(plan_flags.OF_PIPELINES, ("mesh_shape", "layout"))
    kept = {name: value for name, value in note.get("flags", {}).items() if name in known}
    taken = config.apply(kept, str(path), program)
    if taken and tells:
        told = " ".join(f"--{name}={value}" for name, value in taken.items())
        print(f"as it was begun: {told}")
    if tells:
        auto_plan.take(logdir)
    else:
        auto_plan.refuse("texts")
    return taken
