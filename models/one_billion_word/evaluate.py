"""Evaluates a checkpoint of the language model on all of the held-out text.

    python -m models.one_billion_word.evaluate --logdir=runs/tiny

It is `pipemesh evaluate`. Flags that are not given are taken from the checkpoint; the mesh may be
another. A training in the same folder may run meanwhile.
"""

from __future__ import annotations

from pipemesh.commands import process, runs

# Checkpoints name this module, which provides the kind.
from .kind import KIND


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    return runs.evaluate(argv, KIND, __doc__)


if __name__ == "__main__":
    process.run(main)
