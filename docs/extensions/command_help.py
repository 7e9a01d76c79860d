"""The directive `command-help`: what `pipemesh <command> --help` prints."""

from __future__ import annotations

import os
import subprocess
import sys

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


class CommandHelp(SphinxDirective):
    """Its argument is the command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the help as a literal block."""
        # In a process of its own: some commands end theirs.
        done = subprocess.run(
            [sys.executable, "-m", "pipemesh", self.arguments[0], "--help"],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "COLUMNS": "92"},
        )
        return [nodes.literal_block(text=done.stdout, language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
