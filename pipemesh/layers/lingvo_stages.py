"""Stage names in lingvo's checkpoints: added, removed and read."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from lingvo.core import gpipe

from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import is_stage
from pipemesh.layers.layer_names import Place, places_of, scopes_of

# The names that PartitionSequentialLayers gives to stages and layers.
_IN_STAGE = re.compile(r"(?<![^/])d\d+/(?=cell_\d{3,}/)")
_LAYER_IN_STAGE = re.compile(r"(?<![^/])d(\d+)/cell_(\d{3,})/")
_LAYER = re.compile(r"(?<![^/])(?:d\d+/)?(cell_(\d{3,}))(?=/)")


def with_stages(names: Iterable[str], stages: Iterable[Any]) -> dict[str, str]:
    """Returns lingvo's name of each tensor, with the names of stages.

    Example:
        >>> with_stages(["lm/cell_003/w/var/Adam", "global_step"], stages=(0, 3, 7))
        {'lm/cell_003/w/var/Adam': 'lm/d1/cell_003/w/var/Adam', 'global_step': 'global_step'}
    """
    stages = [stages] if isinstance(stages, int) else list(stages)
    stage_of = _stages_of_cells(stages)
    if stage_of is None:
        pairs = {ours: theirs for theirs, ours in _scopes(stages)}
        # Replaces the first match only: a layer may contain another such name.
        return _renamed(names, *_one_of(pairs), f"in a layer ({_few(pairs)})", count=1)

    def in_stage(found: re.Match[str]) -> str:
        layer = int(found[2])
        if layer >= len(stage_of):
            raise PipelineError(
                f"{found.string!r} is of layer {layer}, but the stages have {len(stage_of)} "
                "layers; give the boundaries, or the params, of all stages of the model"
            )
        return f"{stage_of[layer]}/{found[1]}"

    return _renamed(names, _LAYER, in_stage, "in a layer (such as cell_000/...)", count=1)


def without_stages(names: Iterable[str], stages: Iterable[Any] | None = None) -> dict[str, str]:
    """Returns the name of each tensor of lingvo's own pipeline without the names of stages.

    Example:
        >>> without_stages(["lm/d1/cell_003/w/var"])
        {'lm/d1/cell_003/w/var': 'lm/cell_003/w/var'}
    """
    if stages is not None:
        pairs = dict(_scopes(list(stages)))
        return _renamed(names, *_one_of(pairs), f"in a stage ({_few(pairs)})", count=1)
    return _renamed(names, _IN_STAGE, lambda _: "", "in a stage (such as d0/cell_000/...)")


def boundaries_in(names: Iterable[str]) -> list[int]:
    """Reads the boundaries of lingvo's stages from the names of all tensors of its checkpoint.

    Raises:
        PipelineError: none is in a stage of `PartitionSequentialLayers`.

    Example:
        >>> boundaries_in(["lm/d1/cell_000/w/var", "lm/d1/cell_001/w/var", "lm/d2/cell_002/w/var"])
        [0, 0, 2, 3]
    """
    found = filter(None, map(_LAYER_IN_STAGE.search, names))
    stage_of = dict(sorted((int(match[2]), int(match[1])) for match in found))
    if not stage_of:
        raise PipelineError(
            "no variable lies in a stage (such as d0/cell_000/...), as lingvo.core.gpipe has "
            "them; give the stages"
        )
    end = max(stage_of) + 1
    return [
        min((layer for layer, at in stage_of.items() if at >= stage), default=end) if stage else 0
        for stage in range(max(stage_of.values()) + 1)
    ] + [end]


def _stages_of_cells(stages: list[Any]) -> list[str] | None:
    """Returns the stage of each layer of `PartitionSequentialLayers`, or None for other stages."""
    if all(isinstance(stage, int) for stage in stages):
        if stages[:1] != [0] or len(stages) < 2 or any(a > b for a, b in pairwise(stages)):
            raise PipelineError(
                f"stages={stages} are no boundaries; they begin with 0 and rise, such as [0, 3, 7] "
                "for a stage of the first three layers and one of the next four"
            )
        return [f"d{stage}" for stage, (a, b) in enumerate(pairwise(stages)) for _ in range(a, b)]
    places = _places_of(stages)
    if all(
        re.fullmatch(r"d\d+", "/".join(place.stages))
        and place.name == f"cell_{number:03d}"
        and not place.scope_is_given
        for number, place in enumerate(places)
    ):
        return [place.stages[0] for place in places]
    return None


def _places_of(stages: list[Any]) -> list[Place]:
    return places_of(
        stages, lambda p: issubclass(p.cls, gpipe.FeatureExtractionLayer) or is_stage(p)
    )


def _scopes(stages: list[Any]) -> list[tuple[str, str]]:
    """Returns the scopes of the layers of stages, in lingvo and here."""
    places = _places_of(stages)
    return [
        ("/".join((*place.stages, place.name)), "/".join((*scope, place.name)))
        for place, scope in zip(places, scopes_of(places), strict=True)
        if place.stages and not place.scope_is_given
    ]


def _one_of(new: dict[str, str]) -> tuple[re.Pattern[str], Callable[[re.Match[str]], str]]:
    """Returns a pattern for scopes and a function that gives their replacements."""
    longest_first = sorted(map(re.escape, new), key=len, reverse=True)
    pattern = re.compile(rf"(?<![^/])(?:{'|'.join(longest_first) or '(?!)'})(?=/)")
    return pattern, lambda found: new[found[0]]


def _renamed(
    names: Iterable[str],
    pattern: re.Pattern[str],
    new: Callable[[re.Match[str]], str],
    where: str,
    count: int = 0,
) -> dict[str, str]:
    """Replaces the matches of a pattern in names of tensors; raises if two names become equal."""
    called: dict[str, str] = {}
    old: dict[str, str] = {}
    matches = 0
    for name in names:
        called[name], found = pattern.subn(new, name, count)
        matches += found
        if old.setdefault(called[name], name) != name:
            raise PipelineError(
                f"{old[called[name]]!r} and {name!r} would both be {called[name]!r}; give the "
                "params of the stages (stages=...)"
            )
    if not matches:
        raise PipelineError(
            f"no variable lies {where}, as lingvo.core.gpipe has them; the first is "
            f"{next(iter(called), 'missing')!r}. Give the params of the stages if they were "
            "written by hand (stages=...); a checkpoint of this library needs no other names to go "
            "on here"
        )
    return called


def _few(scopes: Iterable[str]) -> str:
    first = [f"{scope}/..." for scope in itertools.islice(scopes, 3)]
    return ", ".join(first) or "there is none"
