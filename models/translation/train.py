"""Trains a translator, and translates held-out sentences with it: `pipemesh train`, then BLEU.

    python -m models.translation.train
    python -m models.translation.train --mesh_shape=layers:3 --logdir=runs/own \\
        --train_data=train.fr+train.es --heldout_data=heldout.tsv

Without data it learns French to Spanish from message catalogues, in minutes. Run it again with the
same `--logdir` to resume.
"""

from __future__ import annotations

import contextlib
import sys

from pipemesh.checkpoint import newest_whole
from pipemesh.commands import process, runs
from pipemesh.commands.flags import FLAGS, is_help
from pipemesh.commands.model_kind import named, note_of
from pipemesh.errors import DataError

from . import evaluate
from .decode import KIND

MODEL = f"{__package__}.params.TranslationTiny"
# Of the pairs that are translated after training.
_PAIRS = 500


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    if not is_help(argv) and "model" not in named(argv) and not note_of(argv):
        argv = [argv[0], f"--model={MODEL}", *argv[1:]]
    if not is_help(argv):
        # Before training, which would be in vain.
        evaluate.load_bleu()
    code = runs.train(argv, KIND, __doc__)
    found = newest_whole(KIND.logdir())
    if code or FLAGS.find_learning_rate or found is None:
        return code
    # Standard output of --log_format=json has objects alone.
    with contextlib.redirect_stdout(sys.stderr if FLAGS.log_format == "json" else sys.stdout):
        try:
            evaluate.report(found[0], _PAIRS)
        except DataError as error:
            print(f"no BLEU: {error}")
    return 0


if __name__ == "__main__":
    process.run(main)
