"""Requirements of `lowering="simd"`: alike stages, or a range of alike layers with named dims."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import hyperparams

from pipemesh.errors import PipelineError, PipemeshError
from pipemesh.layers.check_params import with_article
from pipemesh.layers.feature_extraction import is_stage
from pipemesh.layers.named import NamedLayer
from pipemesh.recurrent.circular.alike_pipeline import check_options, check_schedule
from pipemesh.recurrent.options import Options
from pipemesh.schedule import Schedule

# Params that differ between layers without a change in their computation.
_NAMES = frozenset(
    ("name", "variable_name_prefix", "act_fetch_layers", "stage_scopes", "random_names")
)


def check_lowering(p: Any, schedule: Schedule) -> None:
    """Checks that the lowering in the params can run the stages and the schedule."""
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
        check_options(Options(remat=p.remat, loop=p.loop, check_numerics=p.check_numerics))
    except PipemeshError as error:
        raise type(error)(f"{p.name}: lowering is 'simd': {error}") from error
    if p.loss_inside:
        _check_simd(p)
        return
    first = p.cell_tpl[0]
    for other in p.cell_tpl[1:]:
        difference = next(differences(first, other, "stage"), None)
        if difference is not None:
            raise PipelineError(
                f"{p.name}: lowering='simd' runs stages that are alike, but {difference}; make the "
                "stages alike, or use lowering='placement'"
            )


def differences(a: Any, b: Any, what: str) -> Iterator[str]:
    """Describes the differences of two layers' params; `what` names the layers."""

    def told(verb: str, one: str, other: str) -> str:
        return f"{what} {a.name!r} {verb} {one} and {what} {b.name!r} {verb} {other}"

    if a.cls is not b.cls:
        yield told("is", with_article(a.cls.__name__), with_article(b.cls.__name__))
        return
    a_layers, b_layers = _layers_of(a), _layers_of(b)
    if len(a_layers) != len(b_layers):
        yield told("has", f"{len(a_layers)} layers", str(len(b_layers)))
        return
    for one, other in zip(a_layers, b_layers, strict=True):
        yield from differences(one, other, "layer")
    for path, one, other in _values("", a, b, skip=("sub",) if a_layers else ()):
        yield told(f"has {path}", _short(one), _short(other))


def like_earlier(layers: Sequence[Any]) -> list[int]:
    """Returns for each layer the number of the first one with the same params, but for names."""
    firsts: list[int] = []
    found: list[int] = []
    for number, layer in enumerate(layers):
        same = (first for first in firsts if not any(differences(layers[first], layer, "layer")))
        found.append(next(same, number))
        if found[-1] == number:
            firsts.append(number)
    return found


def shapes_text(shapes: Any) -> str:
    """Returns nested shapes as a text, to compare them by."""
    return str(tf.nest.map_structure(str, shapes))


def _layers_of(p: Any) -> list[Any]:
    """Returns the params in `sub`, unless the layer uses that name for something else."""
    sub = getattr(p, "sub", None)
    return list(sub) if isinstance(sub, list | tuple) and all(map(_is_layer, sub)) else []


def _is_layer(value: Any) -> bool:
    return isinstance(value, hyperparams.InstantiableParams) and value.cls is not None


def _values(
    path: str, a: Any, b: Any, skip: tuple[str, ...] = ()
) -> Iterator[tuple[str, Any, Any]]:
    """Yields the paths at which two values differ, without names, and both values."""
    if isinstance(a, hyperparams.Params) and isinstance(b, hyperparams.Params):
        a_params, b_params = dict(a.IterParams()), dict(b.IterParams())
        for key in [*a_params, *(key for key in b_params if key not in a_params)]:
            if key in _NAMES or key in skip:
                continue
            yield from _values(
                f"{path}.{key}" if path else key, a_params.get(key), b_params.get(key)
            )
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


def simd_split(p: Any, cells: Sequence[Any]) -> tuple[Any | None, list[Any], Any | None]:
    """Splits cells: returns params of the layers before, of the alike layers, and of those behind.

    The alike layers stay in their stages. The others are a cell, or None without such layers.
    """
    before, behind = simd_cut(p)
    stages = [cell.Copy() for cell in cells]
    first, last = stages[0].Copy(), stages[-1].Copy()
    first.Set(name=f"{first.name}_before", sub=first.sub[:before])
    last.Set(name=f"{last.name}_behind", sub=last.sub[len(last.sub) - behind :])
    stages[-1].sub = stages[-1].sub[: len(stages[-1].sub) - behind]
    stages[0].sub = stages[0].sub[before:]
    return first if before else None, stages, last if behind else None


def alike_range(p: Any) -> tuple[int, int]:
    """Returns the range of layers of a stack that a loop over ticks can run between others; (0, 0)
    without such layers.
    """
    layers = [layer for cell in p.cell_tpl for layer in cell.sub]
    begin, end = _longest_run(layers)
    is_run = p.loss_inside and end - begin > 1 and issubclass(layers[begin].cls, NamedLayer)
    return (begin, end) if is_run else (0, 0)


def simd_cut(p: Any) -> tuple[int, int]:
    """Returns the numbers of layers before and behind the longest run of alike layers.

    Each stage has to have equally many of the alike layers.
    """
    for cell in p.cell_tpl:
        if not is_stage(cell) or any(map(is_stage, cell.sub)):
            raise PipelineError(
                f"{p.name}: lowering='simd' takes layers from stages, but {cell.name!r} is a "
                f"{cell.cls.__name__} or has stages inside; make cell_tpl of "
                "FeatureExtractionLayers of layers, as PartitionSequentialLayers does"
            )
        if cell.act_fetch_layers or cell.num_act_inputs:
            raise PipelineError(
                f"{p.name}: stage {cell.name!r} fetches or hands on activations beside those of "
                "its layers, which a loop over ticks does not; use lowering='placement'"
            )
    layers = [layer for cell in p.cell_tpl for layer in cell.sub]
    begin, end = _longest_run(layers)
    number, rest = divmod(end - begin, len(p.cell_tpl))
    wanted = [number] * len(p.cell_tpl)
    wanted[0] += begin
    wanted[-1] += len(layers) - end
    numbers = [len(cell.sub) for cell in p.cell_tpl]
    if rest or not number:
        raise PipelineError(
            f"{p.name}: lowering='simd' gives each of {len(p.cell_tpl)} stages as many alike "
            f"layers, but there are {end - begin} ({layers[begin].cls.__name__}); make that a "
            "multiple of the number of stages, or use lowering='placement'"
        )
    if numbers != wanted:
        sizes, wanted_sizes = (", ".join(map(str, each)) for each in (numbers, wanted))
        raise PipelineError(
            f"{p.name}: lowering='simd' gives each stage {number} of the {end - begin} alike "
            f"layers ({layers[begin].cls.__name__}), so that stages have {wanted_sizes} layers, "
            f"but in cell_tpl they have {sizes}; cut them so, or use "
            "lowering='placement'"
        )
    run = layers[begin:end]
    if not issubclass(run[0].cls, NamedLayer):
        raise PipelineError(
            f"{p.name}: the alike layers are {run[0].cls.__name__}s; with loss_inside "
            "lowering='simd' runs layers with named dims: use some (pipemesh.layers.named), put "
            "the head behind the stack and leave loss_inside unset, or use lowering='placement'"
        )
    names = {layer.name for layer in run}
    for pair in p.tied_weights.items():
        for weight in pair:
            if weight.rpartition(".")[0] in names:
                raise PipelineError(
                    f"{p.name}: tied_weights names {weight!r}, a weight of one of the alike "
                    "layers, which lowering='simd' stacks; tie those of other layers, or use "
                    "lowering='placement'"
                )
    return begin, len(layers) - end


def _check_simd(p: Any) -> None:
    """Checks that a stack with the loss inside can be one program; see `simd_cut`."""
    simd_cut(p)
    for name, wrong, why in (
        ("fprop_dtype", p.fprop_dtype == tf.float16, "the loss is not scaled, which float16 needs"),
        ("state_dtype", p.state_dtype is not None, "activations keep their dtype"),
        ("strict_devices", p.strict_devices, "stages are no functions that are looked into"),
        ("compile", p.compile, "stages are no functions that XLA could compile"),
        ("check_numerics", p.check_numerics == "results", "the loss alone is looked at ('loss')"),
    ):
        if wrong:
            raise PipelineError(
                f"{p.name}: {name} is {getattr(p, name)!r}, but with loss_inside and "
                f"lowering='simd' {why}; leave it out, or use lowering='placement'"
            )


def _longest_run(layers: Sequence[Any]) -> tuple[int, int]:
    """Returns the begin and the end of the longest run of alike layers."""
    best, begin = (0, 1), 0
    for end in range(1, len(layers) + 1):
        if end == len(layers) or next(differences(layers[begin], layers[end], "layer"), None):
            if end - begin > best[1] - best[0]:
                best = begin, end
            begin = end
    return best
