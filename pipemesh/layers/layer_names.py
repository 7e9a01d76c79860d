"""Distinct names for the layers of a stack: for their variables and their random numbers."""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from lingvo.core import py_utils

from pipemesh.errors import PipelineError


class Place(NamedTuple):
    """The position of a layer in a stack."""

    # Names of the stage and of nested stages, outermost first; empty for a bare layer.
    stages: tuple[str, ...]
    name: str
    # Whether the params of its stage set the scope of its variables.
    scope_is_given: bool = False


def places_of(params: Iterable[Any], is_stage: Callable[[Any], bool]) -> list[Place]:
    """Returns the positions of all layers of stages, in order, including nested ones."""
    found: list[Place] = []

    def visit(p: Any, name: str, stages: tuple[str, ...], given: bool) -> None:
        if not is_stage(p):
            found.append(Place(stages, name, given))
            return
        for sub in p.sub:
            sub_name = p.variable_name_prefix + sub.name
            visit(sub, sub_name, (*stages, name), sub_name in p.child_variable_scope_override)

    for p in params:
        visit(p, p.name, (), False)
    return found


def scopes_of(places: list[Place]) -> list[tuple[str, ...]]:
    """Returns the scopes that each layer's variables need before the layer's name.

    The name of the stage is left out where the layer's name is unique, so weights are valid under
    another partition. Otherwise it is included, as in lingvo. Layers nested in a stage keep their
    names.
    """
    lengths = [max(len(place.stages) - 1, 0) for place in places]
    while True:
        scopes = [
            place.stages[len(place.stages) - length :]
            for place, length in zip(places, lengths, strict=True)
        ]
        names = [(*scope, place.name) for scope, place in zip(scopes, places, strict=True)]
        counts = collections.Counter(
            name for name, place in zip(names, places, strict=True) if not place.scope_is_given
        )
        longer = [
            i
            for i, place in enumerate(places)
            if not place.scope_is_given and counts[names[i]] > 1 and lengths[i] < len(place.stages)
        ]
        if not longer:
            return scopes
        for i in longer:
            lengths[i] += 1


def random_names_of(places: list[Place]) -> list[str]:
    """Returns names that key random numbers: numbered in order, independent of the stages."""
    seen: collections.Counter[str] = collections.Counter()
    names = []
    for place in places:
        number = seen[place.name]
        names.append(f"{place.name}#{number}" if number else place.name)
        seen[place.name] += 1
    return names


def check_weights_are_its_own(stack: Any, is_transparent: Callable[[Any], bool]) -> None:
    """Raises a PipelineError if a layer beside a stack shares a variable with it by name.

    Eagerly, equal names mean the same variable. The names of the stack and of its stages are not
    part of the names of variables.
    """
    parent, child = stack.parent, stack
    while parent is not None and is_transparent(parent):
        parent, child = parent.parent, parent
    if parent is None:
        return
    mine = {id(v): (layer, v) for layer in _layers(child, skip_given=True) for v in _own(layer)}
    inside = {id(layer) for layer in _layers(child)}
    for other in _layers(parent):
        if id(other) in inside:
            continue
        for variable in _own(other):
            if id(variable) in mine:
                layer, _ = mine[id(variable)]
                raise PipelineError(
                    f"{stack.params.name}: its layer {layer.params.name!r} and {other.path!r} "
                    f"would train one weight, {variable.name!r}, because the names of a pipeline "
                    "and of its stages are no part of the names of variables; give one of the "
                    "layers another name (or, to tie them, set child_variable_scope_override of "
                    "the stage)"
                )


def _layers(root: Any, skip_given: bool = False) -> list[Any]:
    """Returns a layer and all below it, optionally without those whose scope a stage sets."""
    found: dict[int, Any] = {}

    def visit(layer: Any) -> None:
        if id(layer) in found:
            return
        found[id(layer)] = layer
        given = layer.params.child_variable_scope_override if skip_given else {}
        for name, children in layer.children.items():
            if name not in given:
                for child in py_utils.Flatten(children):
                    visit(child)

    visit(root)
    return list(found.values())


def _own(layer: Any) -> list[Any]:
    return py_utils.Flatten(layer._private_vars)
