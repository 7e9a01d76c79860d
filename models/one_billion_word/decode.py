"""Continues texts with the language model: `pipemesh decode`.

    python -m models.one_billion_word.decode --logdir=runs/tiny \\
        --prompt="The module" --max_tokens=24
"""

from __future__ import annotations

from pipemesh.commands import process, texts

# Checkpoints name this module, which provides the kind.
from .kind import KIND as KIND


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    return texts.decode(argv)


if __name__ == "__main__":
    process.run(main)
