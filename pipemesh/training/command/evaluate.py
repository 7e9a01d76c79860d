"""Judges a checkpoint by one epoch of the held-out data.

    pipemesh evaluate --logdir=runs/a --dataset=Test

Flags that are not given are those that the training was begun with; the mesh may be another. A
training in the same folder may go on meanwhile.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from absl import flags

from pipemesh.checkpoint import Manifest
from pipemesh.checkpoint.lock import hold, hold_newest
from pipemesh.errors import CheckpointError
from pipemesh.example_models import import_model_module
from pipemesh.text import is_missing
from pipemesh.training.command import config, model_flags, quiet, training_flags
from pipemesh.training.command.flags import FILES, FlagError, define_for, group, parse
from pipemesh.training.command.training_flags import newest_note

FLAGS = flags.FLAGS


def main(argv: list[str]) -> int:
    """Evaluates as the flags say.

    Args:
        argv: the program and its arguments.

    Returns:
        The exit code.

    Raises:
        PipemeshError: what is asked for cannot be had.
    """
    quiet.install()
    program = sys.modules[__name__]
    note = note_of(argv)
    if other := note.get("evaluated_by"):
        # A model with flags of its own.
        return program_called(other).main(argv)
    judge(*asked(argv, program, __doc__))
    return 0


def asked(
    argv: list[str], program: ModuleType, about: str | None, tells: bool = True
) -> tuple[Any, str]:
    """The registered model that a command line asks for, and the path of its checkpoint.

    Args:
        argv: the program and its arguments.
        program: the module that flags belong to.
        about: what help begins with.
        tells: see `training_flags.take_up`.

    Raises:
        PipemeshError: they cannot be had.
    """
    names = define_for(program, model_flags.define, training_flags.define, define_checkpoint)
    parse(argv, program, about, names.difference(training_flags.OF_TRAINING))
    check_flags()
    folder = model_flags.logdir()
    training_flags.take_up(folder, program, FLAGS.checkpoint, training_flags.OF_TRAINING, tells)
    path = checkpoint_of(folder)
    model_flags.check_note(Manifest.read(path).note, os.path.dirname(path) or ".")
    return model_flags.subject(), path


def judge(subject: Any, path: str) -> None:
    """Says what a checkpoint is worth.

    Args:
        subject: what it is of.
        path: of the checkpoint.

    Raises:
        PipemeshError: as `pipemesh.training.evaluation.evaluate`.
    """
    from pipemesh.training.evaluation import evaluate
    from pipemesh.training.run import console

    with console.waiting("evaluating"):
        step, score = evaluate(subject, path)
    print(f"{path}, step {step}: {score}")


@group(FILES)
def define_checkpoint() -> None:
    """Defines the flag that names a checkpoint."""
    flags.DEFINE_string(
        "checkpoint", None, "Path of the checkpoint to judge; default: the newest of --logdir."
    )


def check_flags() -> None:
    """Checks what is asked for; a checkpoint that is named says where it lies.

    Raises:
        FlagError: --figures is given without --device_memory.
    """
    if FLAGS.figures is not None and FLAGS.device_memory is None:
        raise FlagError("--figures is for --device_memory here; give that, or leave it out")
    if FLAGS.checkpoint and not FLAGS.logdir:
        FLAGS.logdir = os.path.dirname(FLAGS.checkpoint) or "."


def checkpoint_of(folder: str) -> str:
    """Path of the checkpoint to judge.

    Args:
        folder: of its training.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = FLAGS.checkpoint or hold_newest(folder)
    if path is None:
        raise CheckpointError(f"--logdir={folder!r} has no checkpoint; train first")
    if FLAGS.checkpoint:
        # As of the newest one, a training in the same folder would let go of it.
        hold(path)
    Manifest.read(path).check(path)
    return path


def note_of(argv: list[str]) -> Mapping[str, Any]:
    """The note of the checkpoint that a command line names, before its flags are defined.

    Args:
        argv: the program and its arguments.
    """
    given = named(argv)
    if path := given.get("checkpoint"):
        return Manifest.read(str(path)).note
    return newest_note(str(given["logdir"]))[1] if "logdir" in given else {}


def named(argv: list[str]) -> dict[str, Any]:
    """Returns the flags of a command line by name, before they are defined.

    Args:
        argv: the program and its arguments.
    """
    given: dict[str, Any] = {}
    for word, after in itertools.zip_longest(argv[1:], argv[2:], fillvalue=""):
        name, separator, value = word.lstrip("-").partition("=")
        if word.startswith("-"):
            given[name] = value if separator else after
    if "config" in given:
        # What is wrong with it is said when the flags are parsed.
        with contextlib.suppress(config.ConfigError):
            given = {**config.read(given["config"]), **given}
    return given


def program_called(name: str) -> ModuleType:
    """The program that a checkpoint's note names.

    Args:
        name: of its module.

    Raises:
        CheckpointError: there is none here.
    """
    try:
        return import_model_module(name)
    except ModuleNotFoundError as error:
        if not is_missing(name, error):
            raise
        raise CheckpointError(
            f"the checkpoint is of {name}, and there is no module {error.name!r} here; call from "
            "the folder in which the package lies, or put that folder on PYTHONPATH"
        ) from error
