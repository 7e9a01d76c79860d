"""Trains the one-billion-word language model: `pipemesh train` with its flags.

    python -m models.one_billion_word.train --mesh_shape=layers:2 --steps=300 --logdir=/tmp/lm

Run it again with the same `--logdir` to resume.
"""

from __future__ import annotations

from pipemesh.commands import process, runs

from .kind import KIND


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    return runs.train(argv, KIND, __doc__)


if __name__ == "__main__":
    process.run(main)
