"""Makes a page of a training, or compares several.

A training writes record.jsonl into its log directory while it runs, and report.html when it ends.
The page needs no network. Decoded text is shown if samples.jsonl in the log directory has it:

  pipemesh decode --logdir=runs/a --prompt="The module" --format=json >> runs/a/samples.jsonl

  pipemesh report runs/a
  pipemesh report runs/a runs/b --output comparison.html
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from pipemesh.errors import ReportError
from pipemesh.report.run import read
from pipemesh.report.run_pages import comparison, page

PAGE = "report.html"
"""The page of a run, in its log directory."""
COMPARISON = "comparison.html"
"""The page of several, in the log directory of the last one."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options of `pipemesh report`.

    Args:
        parser: the parser of this subcommand.
    """
    parser.add_argument(
        "logdir", nargs="+", help="the log directory of a training; several are compared"
    )
    parser.add_argument(
        "--output",
        metavar="FILE",
        help=f"the page to write; default: {PAGE} in the log directory, or {COMPARISON} in the "
        "last one of several",
    )


def run(arguments: argparse.Namespace) -> int:
    """Does what the options say.

    Args:
        arguments: the parsed options.

    Returns:
        The exit code, 0.

    Raises:
        ReportError: there is no record, or the page cannot be written.
    """
    runs = [read(folder) for folder in arguments.logdir]
    text = page(runs[0]) if len(runs) == 1 else comparison(runs)
    name = PAGE if len(runs) == 1 else COMPARISON
    path = arguments.output or os.path.join(arguments.logdir[-1], name)
    try:
        Path(path).write_text(text, encoding="utf-8", errors="replace")
    except OSError as error:
        raise ReportError(
            f"{path!r} cannot be written ({error.strerror}); give another --output"
        ) from error
    print(f"report: {path}")
    return 0
