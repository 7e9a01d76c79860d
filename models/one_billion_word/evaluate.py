"""Judges a checkpoint of the language model by all of the held-out text.

    python -m models.one_billion_word.evaluate --logdir=runs/OneBillionWordTiny

Flags that are not given are those that the training was begun with; the mesh may be another. A
training in the same folder may go on meanwhile.
"""

from __future__ import annotations

from pipemesh.training.command import program


def main(argv: list[str]) -> int:
    """Evaluates as the flags say; returns the exit code."""
    from pipemesh.checkpoint import Manifest
    from pipemesh.training.command.config import names
    from pipemesh.training.command.evaluate import (
        check_flags,
        checkpoint_of,
        define_checkpoint,
        judge,
    )
    from pipemesh.training.command.flags import define_for
    from pipemesh.training.command.training_flags import OF_TRAINING

    from . import command_line
    from .train import make_subject, read_text

    define_for(command_line, define_checkpoint)
    command_line.parse(argv, __doc__, set(names(command_line)).difference(OF_TRAINING))
    check_flags()
    command_line.take_up(command_line.FLAGS.checkpoint, OF_TRAINING)
    request = command_line.request()
    path = checkpoint_of(request.logdir)
    subject, _ = make_subject(request, read_text(request, path, Manifest.read(path)))
    judge(subject, path)
    return 0


if __name__ == "__main__":
    program.run(main)
