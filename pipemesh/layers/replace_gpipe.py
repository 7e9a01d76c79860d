"""Replacement of lingvo modules by pipemesh packages."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from typing import Any

from pipemesh.errors import PipelineError


class StandIn(types.ModuleType):
    """A module with the name of a lingvo module and the names of `source`.

    Names are looked up on use, because the modules may import each other.
    """

    def __init__(self, name: str, source: str) -> None:
        super().__init__(name)
        self._source = source

    def __getattr__(self, name: str) -> Any:
        source = importlib.import_module(self._source)
        if name not in source.__all__:
            raise AttributeError(f"{self._source} has no {name}")
        return getattr(source, name)


def replace_gpipe() -> None:
    """Runs lingvo's own pipelined models by pipemesh: `GPipeTransformerLm`, `layers_with_gpipe`.

    After this call `lingvo.core.gpipe` has the names of `pipemesh.layers` in every import. Call it
    before you import a lingvo model, for example in the first lines of your model's module.

    Raises:
        PipelineError: a module with subclasses of lingvo's layers is imported already.

    Example:
        >>> from pipemesh.layers import PipeliningLayer, replace_gpipe
        >>> replace_gpipe()  # doctest: +SKIP
        >>> from lingvo.core import layers_with_gpipe  # doctest: +SKIP
        >>> stack = layers_with_gpipe.GPipeBatchMajorTransformerStack  # doctest: +SKIP
        >>> issubclass(stack, PipeliningLayer)  # doctest: +SKIP
        True
    """
    replace_module("lingvo.core.gpipe", "pipemesh.layers")


def replace_module(name: str, source: str) -> None:
    """Replaces a lingvo module by the names of a pipemesh module.

    Raises:
        PipelineError: a module with subclasses of lingvo's classes is already imported.
    """
    package, _, last = name.rpartition(".")
    replaced = importlib.import_module(name)
    if isinstance(replaced, StandIn):
        return
    names = [n for n in importlib.import_module(source).__all__ if hasattr(replaced, n)]
    _check_no_subclass(replaced, [getattr(replaced, n) for n in names])
    module = StandIn(name, source)
    places = {id(replaced): module} | {id(getattr(replaced, n)): getattr(module, n) for n in names}
    for other in list(sys.modules.values()):
        if not isinstance(other, types.ModuleType) or other is replaced:
            continue
        if other.__name__.startswith("pipemesh"):
            continue
        for attribute, value in list(vars(other).items()):
            if id(value) in places:
                setattr(other, attribute, places[id(value)])
    sys.modules[name] = module
    setattr(importlib.import_module(package), last, module)


def _check_no_subclass(module: types.ModuleType, values: list[Any]) -> None:
    for cls in filter(inspect.isclass, values):
        for sub in cls.__subclasses__():
            if sub.__module__ != module.__name__:
                raise PipelineError(
                    f"{sub.__module__} is imported already, with a {cls.__name__} of "
                    f"{module.__name__}; call replace_gpipe() before you import it"
                )
