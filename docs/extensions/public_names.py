"""Links to public names, also where a docstring or a type calls them otherwise."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from types import ModuleType

from docutils import nodes
from sphinx.addnodes import pending_xref
from sphinx.application import Sphinx
from sphinx.domains.python import PyObject
from sphinx.environment import BuildEnvironment

import pipemesh.errors


class PublicNames:
    """Public names by what else a text may call them."""

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def find(self, target: str) -> str | None:
        """The public name that is meant; None if there is none."""
        if not self._names:
            self._collect()
        return self._names.get(target.removeprefix("~"))

    def _collect(self) -> None:
        self._add(pipemesh.errors, _classes(pipemesh.errors))
        for module in pkgutil.walk_packages(pipemesh.__path__, "pipemesh."):
            if module.ispkg:
                door = importlib.import_module(module.name)
                self._add(door, getattr(door, "__all__", ()))

    def _add(self, door: ModuleType, names: Iterable[str]) -> None:
        for name in names:
            thing = getattr(door, name)
            public = f"{door.__name__}.{name}"
            at_home = f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', name)}"
            # Of two doors, such as `schedule` and `schedule.builders`, the outer one comes first.
            for other in (name, public, at_home):
                self._names.setdefault(other, public)


def _classes(module: ModuleType) -> list[str]:
    return [name for name, thing in vars(module).items() if isinstance(thing, type)]


_public = PublicNames()


def resolve(
    app: Sphinx, env: BuildEnvironment, node: pending_xref, contnode: nodes.TextElement
) -> nodes.Node | None:
    """Links what Sphinx did not find.

    Returns:
        A link; the text as it is, if it is no name of ours; or None, which is a warning.
    """
    if node.get("refdomain") != "py":
        return None
    target = node["reftarget"]
    public = _public.find(target)
    if public is not None:
        python = env.domains["py"]
        return python.resolve_xref(env, node["refdoc"], app.builder, "obj", public, node, contnode)
    return None if _is_lost(target) else contnode


def _is_lost(target: str) -> bool:
    """Whether a text names something of pipemesh that does not exist."""
    parts = target.split(".")
    if parts[0] != "pipemesh" or not all(part.isidentifier() for part in parts):
        return False
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return True
    return False


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    for field in PyObject.doc_field_types:
        if field.name == "variable":
            field.label = "Attributes"
    app.connect("missing-reference", resolve)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
