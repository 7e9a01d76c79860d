"""Says what a trained model makes of each held-out example.

    pipemesh predict --logdir=runs/a --dataset=Test

Standard output has a line of JSON for each example: what `ComputePredictions` of the task returns,
as far as it has a row an example. Flags that are not given are those that the training was begun
with; the mesh may be another.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from absl import flags

from pipemesh.checkpoint import Manifest
from pipemesh.errors import CheckpointError
from pipemesh.training.command import model_flags, quiet, training_flags
from pipemesh.training.command.evaluate import (
    check_flags,
    checkpoint_of,
    define_checkpoint,
    note_of,
)
from pipemesh.training.command.flags import parse

FLAGS = flags.FLAGS


def main(argv: list[str]) -> int:
    """Predicts as the flags say.

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
    if "decoded_by" in note:
        raise CheckpointError(
            f"the checkpoint is of {note.get('program', 'a model')}, which continues and scores "
            "texts; use pipemesh decode or pipemesh score"
        )
    model_flags.define()
    training_flags.define()
    define_checkpoint()
    parse(argv, program, __doc__)
    check_flags()
    folder = model_flags.logdir()
    training_flags.take_up(folder, program, FLAGS.checkpoint, leave=())
    path = checkpoint_of(folder)
    model_flags.check_note(Manifest.read(path).note, os.path.dirname(path) or ".")
    subject = model_flags.subject()
    from pipemesh.training.prediction import Predictor
    from pipemesh.training.run import console

    with console.waiting("making the model"):
        predictor = Predictor(subject, path)
    for number, example in enumerate(predictor.examples()):
        values = {name: _plain(value.tolist()) for name, value in example.items()}
        print(json.dumps({"number": number, **values}))
    if predictor.left_out:
        told = ", ".join(sorted(predictor.left_out))
        print(f"left out, as it has no row for each example: {told}", file=sys.stderr)
    return 0


def _plain(value: Any) -> Any:
    """A value as JSON has it, with as many digits as float32."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return float(f"{value:.8g}") if isinstance(value, float) else value
