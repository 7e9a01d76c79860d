"""`pipemesh checkpoint import` and `export`."""

from __future__ import annotations

import argparse

from . import transfer


def run(arguments: argparse.Namespace) -> int:
    """Does what the verb asks for; returns the exit code."""
    if arguments.verb == "import":
        told = transfer.import_weights(
            arguments.source,
            arguments.logdir,
            arguments.config,
            arguments.model,
            arguments.dtype or "float32",
        )
    else:
        told = transfer.export_weights(arguments.path, arguments.to, arguments.dtype or "float32")
    print("\n".join(told))
    return 0
