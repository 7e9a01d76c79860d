"""The flags of a training of any model: how long, how often, where to."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Collection, Mapping
from typing import Any

from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.folder import path_of, steps_of
from pipemesh.commands import host_flags, plan_flags
from pipemesh.commands.flags import FILES, FLAGS, TRAINING, Flag, FlagError, grouped
from pipemesh.errors import CheckpointError
from pipemesh.training.run import EVAL_BATCHES, LOG_FORMATS, ON_NONFINITE

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
    *plan_flags.CHOICE_NAMES,
    *host_flags.NAMES,
)
# Those that a program that does not train refuses.
OF_TRAINING = (*_OF_OPTIONS, "profile_steps")


def training_flags(drawn: str = "the first ones") -> tuple[Flag, ...]:
    """Returns them.

    Args:
        drawn: which batches are a part of all held-out ones, in words.
    """
    return (
        *plan_flags.CHOICE_FLAGS,
        Flag(
            "logdir",
            value="FOLDER",
            help="Folder of checkpoints, summaries and the like; default: runs/ and the "
            "name of the model.",
            group=FILES,
        ),
        *grouped(
            TRAINING,
            Flag(
                "steps",
                int,
                300,
                least=0,
                help="Train up to this step; a model's own p.train.max_steps is the default before "
                "this one.",
            ),
            Flag("eval_every", int, 100, least=1, help="Steps between evaluations."),
            Flag(
                "eval_batches",
                int,
                least=1,
                help=f"Held-out batches to evaluate on, {drawn}; default: {EVAL_BATCHES} while "
                "training, and all at the end.",
            ),
            Flag(
                "early_stop",
                int,
                0,
                least=0,
                help="End training after this many evaluations in a row that are no better than "
                "the best one before them; 0 for never.",
            ),
            Flag("save_every", int, 100, least=1, help="Steps between checkpoints."),
            Flag(
                "on_nonfinite",
                default="skip",
                choices=ON_NONFINITE,
                help="What to do with a step whose loss or gradients are not finite: leave the "
                "weights as they are and continue with the next batch, or end training.",
            ),
            Flag("max_to_keep", int, 3, least=1, help="Number of newest checkpoints to keep."),
            Flag(
                "keep_best",
                int,
                0,
                least=0,
                help="Number of checkpoints to keep besides, of those with the best evaluations: "
                "of steps at which --eval_every and --save_every meet.",
            ),
            Flag(
                "trace_schedule",
                bool,
                False,
                help="After training, run six more steps that time every action; writes "
                "schedule.html and schedule_trace.json (chrome://tracing) into --logdir, predicted "
                "beside measured.",
            ),
            Flag(
                "find_learning_rate",
                int,
                0,
                least=0,
                help="Instead of training, run a learning-rate range test with this many rising "
                "rates, for example 100; prints the rates at which the model learns, and writes "
                "learning_rates.csv into --logdir. No weights are saved.",
            ),
            Flag(
                "log_format",
                default="text",
                choices=LOG_FORMATS,
                help="Standard output has lines for people, or for programs an object of JSON a "
                "line and nothing else, the same as record.jsonl in --logdir; text goes to "
                "standard error then.",
            ),
            Flag(
                "histogram_every",
                int,
                0,
                least=0,
                help="Steps between histograms for TensorBoard of each weight, its gradient and "
                "its update; 0 for none.",
            ),
            Flag(
                "profile_steps",
                value="FIRST:LAST",
                help="Profile these steps with TensorFlow's profiler, such as 10:15, from the 10th "
                "to the 15th; TensorBoard shows plugins/profile in --logdir. The first step builds "
                "the graph.",
            ),
        ),
    )


def options() -> dict[str, Any]:
    """Returns the `Options` that the flags give, but the log directory.

    Raises:
        FlagError: flags do not go together.
    """
    if 0 < FLAGS.find_learning_rate < _FEWEST_RATES:
        raise FlagError(
            f"--find_learning_rate={FLAGS.find_learning_rate}: too few to find a range; give "
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
    return {**found, "profile_steps": _profile_steps(), **plan_flags.choice_options()}


def _profile_steps() -> tuple[int, int] | None:
    """Returns the first and the last step to profile.

    Raises:
        FlagError: the steps are invalid.
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


def given() -> dict[str, Any]:
    """Returns the flags that are given and kept with checkpoints, by name."""
    return {name: value for name, value in FLAGS.given().items() if name not in _OF_A_CALL}


def newest_note(logdir: str) -> tuple[str | None, Mapping[str, Any]]:
    """Returns path and note of the newest checkpoint with a readable manifest, or None and {}.

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
    checkpoint: str | None = None,
    leave: Collection[str] = (),
    tells: bool = True,
) -> None:
    """Takes flags that are not given from a checkpoint, and prints them.

    Args:
        logdir: the folder of the training.
        checkpoint: path of the checkpoint; by default the newest of the folder.
        leave: flags that the program does not use.
        tells: prints what it took; a program that does not continues or scores texts.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    if checkpoint:
        path, note = checkpoint, Manifest.read(checkpoint).note
    else:
        path, note = newest_note(logdir)
    known = set(FLAGS.names()).difference(leave)
    if FLAGS.plain and FLAGS.is_given("plain"):
        # What it was begun with is a pipeline's.
        known.difference_update(plan_flags.OF_PIPELINES, ("mesh_shape", "layout"))
    kept = {name: value for name, value in note.get("flags", {}).items() if name in known}
    taken = FLAGS.apply(kept, str(path))
    if taken and tells:
        words = " ".join(f"--{name}={value}" for name, value in taken.items())
        print(f"resuming with saved flags: {words}")
    if tells:
        plan_flags.choose_plan(logdir)
    else:
        plan_flags.refuse_auto("texts")
