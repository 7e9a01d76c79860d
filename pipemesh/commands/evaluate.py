"""Evaluates a checkpoint on one epoch of the held-out data.

    pipemesh evaluate --logdir=runs/a --dataset=Test

Flags that are not given are taken from the checkpoint; the mesh may be another. A training in the
same folder may run meanwhile.
"""

from __future__ import annotations

from typing import Any

from pipemesh.commands import process
from pipemesh.commands.flags import FLAGS, Command, parse
from pipemesh.commands.model_kind import (
    CHECKPOINT_FLAG,
    REGISTERED,
    ModelKind,
    check_flags,
    kind_called,
    note_of,
)
from pipemesh.commands.training_flags import OF_TRAINING, take_up


def main(argv: list[str], kind: ModelKind | None = None, about: str | None = __doc__) -> int:
    """Evaluates as the flags say; returns the exit code.

    Args:
        argv: the program and its arguments.
        kind: of models; None for the one that the checkpoint notes.
        about: begins `--help`.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    name = note_of(argv).get("evaluated_by")
    subject, path = requested(argv, kind or (kind_called(name) if name else REGISTERED), about)
    judge(subject, path)
    return 0


def requested(
    argv: list[str], kind: ModelKind, about: str | None, tells: bool = True
) -> tuple[Any, str]:
    """Returns the model that a command line names, and the path of its checkpoint.

    Args:
        argv: the program and its arguments.
        kind: of the model.
        about: begins `--help`.
        tells: see `take_up`.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    refused: dict[str, str] = dict.fromkeys(OF_TRAINING, "is for training")
    parse(argv, Command(argv[0], about, (*kind.flags, CHECKPOINT_FLAG), refused=refused))
    check_flags()
    take_up(kind.logdir(), FLAGS.checkpoint, OF_TRAINING, tells)
    return kind.evaluation()


def judge(subject: Any, path: str) -> None:
    """Evaluates a checkpoint, and prints its score.

    Raises:
        PipemeshError: as `pipemesh.training.evaluation.evaluate`.
    """
    from pipemesh.training.evaluation import evaluate
    from pipemesh.training.run import console

    with console.waiting("evaluating"):
        step, score = evaluate(subject, path)
    print(f"{path}, step {step}: {score}")
