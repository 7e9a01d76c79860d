"""The directive `command-help`: what `pipemesh <command> --help` prints."""

from __future__ import annotations

import contextlib
import io
import os
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from pipemesh.cli import main


class CommandHelp(SphinxDirective):
    """Its argument is the command."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        """Returns the help as a literal block."""
        text = io.StringIO()
        with (
            contextlib.redirect_stdout(text),
            contextlib.suppress(SystemExit),
            mock.patch.dict(os.environ, COLUMNS="92"),
        ):
            main([self.arguments[0], "--help"])
        return [nodes.literal_block(text=text.getvalue(), language="text")]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
