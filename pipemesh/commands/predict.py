"""Writes the predictions of a trained model for each held-out example.

    pipemesh predict --logdir=runs/a --dataset=Test

Standard output has a line of JSON for each example: what `ComputePredictions` of the task returns,
as far as it has a row an example. Flags that are not given are taken from the checkpoint; the mesh
may be another.
"""

from __future__ import annotations

import math
import sys
from typing import Any

from pipemesh.commands import process
from pipemesh.commands.model_kind import REGISTERED, note_of
from pipemesh.commands.runs import requested
from pipemesh.commands.texts import line_of
from pipemesh.errors import CheckpointError
from pipemesh.training.run import console


def main(argv: list[str]) -> int:
    """Predicts as the flags say; returns the exit code.

    Raises:
        PipemeshError: the request cannot be satisfied.
    """
    process.import_quietly()
    note = note_of(argv)
    if "decoded_by" in note:
        raise CheckpointError(
            f"the checkpoint is of {note.get('program', 'a model')}, which continues and scores "
            "texts; use pipemesh decode or pipemesh score"
        )
    # Standard output has predictions alone.
    subject, path = requested(argv, REGISTERED, __doc__, tells=False)
    from pipemesh.training.evaluation import Predictor

    console.output_matters()
    with console.waiting("making the model"):
        predictor = Predictor(subject, path)
    for number, example in enumerate(predictor.examples()):
        values = {name: _plain(value.tolist()) for name, value in example.items()}
        print(line_of({"number": number, **values}), flush=True)
    if predictor.left_out:
        names = ", ".join(sorted(predictor.left_out))
        print(f"left out, as it has no row for each example: {names}", file=sys.stderr)
    return 0


def _plain(value: Any) -> Any:
    """Converts a value for JSON, which knows no infinity, with all digits of float32."""
    if isinstance(value, list):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    if not isinstance(value, float):
        return value
    return float(f"{value:.9g}") if math.isfinite(value) else None
