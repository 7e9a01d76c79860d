"""Judges a checkpoint by one epoch of the held-out data.

    pipemesh evaluate --logdir=runs/a --dataset=Test

Flags that are not given are those that the training was begun with; the mesh may be another. A
training in the same folder may go on meanwhile.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

from absl import flags

from pipemesh.checkpoint import Manifest, newest
from pipemesh.errors import CheckpointError
from pipemesh.training.command import model_flags, quiet, training_flags
from pipemesh.training.command.flags import FlagError, parse
from pipemesh.training.command.training_flags import newest_note

FLAGS = flags.FLAGS

# The help of `--checkpoint`.
ABOUT_CHECKPOINT = "Path of the checkpoint to judge; default: the newest of --logdir."


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
    note = _note_of(argv)
    if other := note.get("evaluated_by"):
        # A model with flags of its own.
        return importlib.import_module(other).main(argv)
    model_flags.define()
    training_flags.define()
    flags.DEFINE_string("checkpoint", None, ABOUT_CHECKPOINT)
    parse(argv, program, __doc__)
    check_whole()
    folder = model_flags.logdir()
    training_flags.take_up(folder, program)
    path = checkpoint_of(folder)
    model_flags.check_note(Manifest.read(path).note, folder)
    judge(model_flags.subject(), path)
    return 0


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


def check_whole() -> None:
    """Checks that all of the held-out data is asked for.

    Raises:
        FlagError: a part is.
    """
    if FLAGS["eval_batches"].present:
        raise FlagError("--eval_batches is for training; all held-out batches are judged by here")


def checkpoint_of(folder: str) -> str:
    """Path of the checkpoint to judge.

    Args:
        folder: of its training.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    path = FLAGS.checkpoint or newest(folder)
    if path is None:
        raise CheckpointError(f"--logdir={folder!r} has no checkpoint; train first")
    Manifest.read(path).check(path)
    return path


def _note_of(argv: list[str]) -> dict[str, Any]:
    """The note of the newest checkpoint in the folder that a command line names."""
    words = [word.lstrip("-") for word in argv[1:]]
    given = [word.partition("=")[2] for word in words if word.startswith("logdir=")]
    given += [after for word, after in zip(words, argv[2:], strict=False) if word == "logdir"]
    return dict(newest_note(given[-1])[1]) if given else {}
