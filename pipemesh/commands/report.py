"""Makes a page of a run, or compares several.

A training writes record.jsonl into its log directory while it runs, and report.html when it ends.
The page needs no network. Decoded text is shown if samples.jsonl in the log directory has it:

  pipemesh decode --logdir=runs/a --prompt="The module" --format=json >> runs/a/samples.jsonl

  pipemesh report runs/a
  pipemesh report runs/a runs/b --output=comparison.html
"""

from __future__ import annotations

import os

from pipemesh.commands.flags import Command, Flag, parse, write_output
from pipemesh.report.record import PAGE, read
from pipemesh.report.run_pages import comparison, page

# The page of several runs, in the log directory of the last one.
COMPARISON = "comparison.html"
COMMAND = Command(
    "pipemesh report",
    __doc__,
    (
        Flag("logdir", argument="+", help="Log directory of a run; several are compared."),
        Flag(
            "output",
            value="FILE",
            help=f"Page to write; default: {PAGE} in the log directory, or {COMPARISON} in the "
            "last one of several.",
        ),
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, COMMAND)
    runs = [read(folder) for folder in flags.logdir]
    text = page(runs[0]) if len(runs) == 1 else comparison(runs)
    name = PAGE if len(runs) == 1 else COMPARISON
    path = flags.output or os.path.join(flags.logdir[-1], name)
    # Names may have characters that are not UTF-8.
    write_output("--output", path, text.encode(errors="replace").decode())
    print(f"report: {path}")
    return 0
