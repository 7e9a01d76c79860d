"""Checks for a stack of alike stages, for `lowering="simd"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from lingvo.core import hyperparams

from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers.check_params import check_choice, with_article
from pipemesh.plan.plan import LOWERINGS
from pipemesh.recurrent import pipeline
from pipemesh.recurrent.circular.alike_pipeline import alike_pipeline, check_options, check_schedule
from pipemesh.recurrent.options import Options
from pipemesh.schedule import Schedule

# Params that differ between layers without a change in their computation.
_NAMES = frozenset(
    ("name", "variable_name_prefix", "act_fetch_layers", "stage_scopes", "random_names")
)
_WAY_OUT = "make the stages alike, or use lowering='placement'"


def pipeline_of(p: Any) -> Callable[..., Any]:
    """Returns the function that runs a pipeline with the loss outside, by `lowering`."""
    return alike_pipeline if p.lowering == "simd" else pipeline


def check_predictable(p: Any) -> None:
    """Raises a PipelineError if memory cannot be predicted."""
    if p.lowering == "simd":
        raise PipelineError(
            f"{p.name}: memory is predicted for lowering='placement' only; with 'simd' a device "
            "keeps the inputs of its stages, for each tick those of one microbatch"
        )


def check_lowering(p: Any, schedule: Schedule) -> None:
    """Checks that the lowering in the params can run the stages.

    Raises:
        PipelineError: there is no such lowering; or, for `simd`, two stages differ, or a param is
            not supported.
        ScheduleError: for `simd`, the schedule is not that of a loop over ticks.
    """
    check_choice(p.name, "lowering", p.lowering, LOWERINGS)
    if p.lowering != "simd":
        return
    if not p.loss_inside and (p.layout or ";" in (p.mesh_shape or "")):
        raise PipelineError(
            f"{p.name}: mesh_shape is {p.mesh_shape!r} and layout {p.layout!r}; lowering='simd' "
            "has one device a stage where the loss is outside: use a mesh of the axis 'layers' "
            "alone and no layout, layers with named dims and loss_inside, or lowering='placement'"
        )
    try:
        check_schedule(schedule)
        check_options(
            Options(remat=p.remat, loop=p.loop, rolled=p.rolled, check_numerics=p.check_numerics)
        )
    except PipemeshError as error:
        raise type(error)(f"{p.name}: lowering is 'simd': {error}") from error
    if p.loss_inside:
        return
    first = p.cell_tpl[0]
    for other in p.cell_tpl[1:]:
        found = next(differences(first, other, "stage"), None)
        if found is not None:
            raise PipelineError(
                f"{p.name}: lowering='simd' runs stages that are alike, but {found}; {_WAY_OUT}"
            )


def differences(a: Any, b: Any, what: str) -> Iterator[str]:
    """Describes the differences of two layers' params; `what` names the layers."""

    def told(verb: str, one: str, other: str) -> str:
        return f"{what} {a.name!r} {verb} {one} and {what} {b.name!r} {verb} {other}"

    if a.cls is not b.cls:
        yield told("is", with_article(a.cls.__name__), with_article(b.cls.__name__))
        return
    mine, theirs = list(getattr(a, "sub", ())), list(getattr(b, "sub", ()))
    if len(mine) != len(theirs):
        yield told("has", f"{len(mine)} layers", str(len(theirs)))
        return
    for one, other in zip(mine, theirs, strict=True):
        if _is_layer(one) and _is_layer(other):
            yield from differences(one, other, "layer")
    for path, one, other in _values("", a, b, skip=("sub",) if mine else ()):
        yield told(f"has {path}", _short(one), _short(other))


def _is_layer(value: Any) -> bool:
    return isinstance(value, hyperparams.InstantiableParams) and value.cls is not None


def _values(
    path: str, a: Any, b: Any, skip: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the paths at which two values differ, without names, and both values."""
    if isinstance(a, hyperparams.Params) and isinstance(b, hyperparams.Params):
        mine, theirs = dict(a.IterParams()), dict(b.IterParams())
        for key in [*mine, *(key for key in theirs if key not in mine)]:
            if key in _NAMES or key in skip:
                continue
            yield from _values(f"{path}.{key}" if path else key, mine.get(key), theirs.get(key))
    elif isinstance(a, Mapping) and isinstance(b, Mapping) and a.keys() == b.keys():
        for key in a:
            yield from _values(f"{path}[{key!r}]", a[key], b[key])
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        for number, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _values(f"{path}[{number}]", one, other)
    elif not _equal(a, b):
        yield path, a, b


def _equal(a: Any, b: Any) -> bool:
    if a is b:
        return True
    try:
        # Comparing arrays gives no bool, so their texts are compared.
        same = a == b
        return same if isinstance(same, bool) else type(a) is type(b) and repr(a) == repr(b)
    except (TypeError, ValueError):
        return False


def _short(value: Any) -> str:
    text = getattr(value, "__name__", None) or repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"another {type(value).__name__}"
