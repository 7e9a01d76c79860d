"""Writes what `Params()` of a layer defines into its documentation, as a table."""

from __future__ import annotations

import pkgutil
from typing import Any

from sphinx.application import Sphinx


def add_table(
    app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]
) -> None:
    """Adds the parameters that lingvo's base class does not have, if this is a `Params`."""
    if not name.endswith(".Params"):
        return
    layer = pkgutil.resolve_name(name.removesuffix(".Params"))
    base = next(c for c in layer.__mro__ if not c.__module__.startswith("pipemesh."))
    theirs = {key for key, _ in base.Params().IterParams()}
    params = layer.Params()
    lines += ["", ".. list-table::", "   :header-rows: 1", "   :widths: 22 14 64", ""]
    lines += _row("name", "default", "")
    for key, default in params.IterParams():
        if key not in theirs:
            about = params._params[key]._description
            lines += _row(f"``{key}``", f"``{default!r}``", about.replace("*", r"\*"))
    lines.append("")


def _row(name: str, default: str, about: str) -> list[str]:
    return [f"   * - {name}", f"     - {default}", f"     - {about}"]


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    # After napoleon.
    app.connect("autodoc-process-docstring", add_table, priority=600)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
