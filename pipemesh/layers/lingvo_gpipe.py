"""Models and checkpoints of `lingvo.core.gpipe`.

lingvo puts the name of the stage into the names of variables (`d0/cell_003/w/var`), so its
checkpoints fit one partition only. Here they are `cell_003/w/var` under every partition. This
module converts between both.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
import types
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import lingvo.compat as tf
from lingvo.core import gpipe, py_utils

from pipemesh.checkpoint.conversion import convert, names_of
from pipemesh.checkpoint.files import is_pattern
from pipemesh.errors import CheckpointError, PipelineError
from pipemesh.layers.feature_extraction import (
    FeatureExtractionLayer,
    Place,
    is_stage,
    places_of,
    scopes_of,
)

# The names that PartitionSequentialLayers gives to stages and layers.
_IN_STAGE = re.compile(r"(?<![^/])d\d+/(?=cell_\d{3,}/)")
_LAYER_IN_STAGE = re.compile(r"(?<![^/])d(\d+)/cell_(\d{3,})/")
_LAYER = re.compile(r"(?<![^/])(?:d\d+/)?(cell_(\d{3,}))(?=/)")


def with_stages(names: Iterable[str], stages: Iterable[Any]) -> dict[str, str]:
    """Returns lingvo's name of each tensor, with the names of stages (`lm/d1/cell_003/w/var`)."""
    stages = [stages] if isinstance(stages, int) else list(stages)
    stage_of = _stages_of_cells(stages)
    if stage_of is None:
        return _with_scopes(names, {ours: theirs for theirs, ours in _scopes(stages)}, "layer")

    def in_stage(match: re.Match[str]) -> str:
        layer = int(match[2])
        if layer >= len(stage_of):
            raise PipelineError(
                f"{match.string!r} is of layer {layer}, but the stages have {len(stage_of)} "
                "layers; give the boundaries, or the params, of all stages of the model"
            )
        return f"{stage_of[layer]}/{match[1]}"

    return _renamed(names, _LAYER, in_stage, "in a layer (such as cell_000/...)")


def without_stages(names: Iterable[str], stages: Iterable[Any] | None = None) -> dict[str, str]:
    """Returns the name of each tensor of lingvo's own pipeline without the names of stages."""
    if stages is not None:
        return _with_scopes(names, dict(_scopes(list(stages))), "stage")
    return _renamed(names, _IN_STAGE, lambda _: "", "in a stage (such as d0/cell_000/...)", count=0)


def boundaries_in(names: Iterable[str]) -> list[int]:
    """Reads the boundaries of lingvo's stages from the names of all tensors of its checkpoint."""
    matches = filter(None, map(_LAYER_IN_STAGE.search, names))
    stage_of = dict(sorted((int(match[2]), int(match[1])) for match in matches))
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


def _with_scopes(names: Iterable[str], new: dict[str, str], kind: str) -> dict[str, str]:
    """Replaces scopes in names of tensors."""
    longest_first = sorted(map(re.escape, new), key=len, reverse=True)
    pattern = re.compile(rf"(?<![^/])(?:{'|'.join(longest_first) or '(?!)'})(?=/)")
    few = ", ".join(f"{scope}/..." for scope in itertools.islice(new, 3)) or "there is none"
    return _renamed(names, pattern, lambda found: new[found[0]], f"in a {kind} ({few})")


def _renamed(
    names: Iterable[str],
    pattern: re.Pattern[str],
    new: Callable[[re.Match[str]], str],
    where: str,
    count: int = 1,
) -> dict[str, str]:
    """Replaces matches of a pattern in names of tensors; raises if two names become equal.

    By default only the first is replaced: a layer may contain another such name.
    """
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


def replace_gpipe() -> None:
    """Runs lingvo's own pipelined models by pipemesh: `GPipeTransformerLm`, `layers_with_gpipe`.

    After this call `lingvo.core.gpipe` has the names of `pipemesh.layers` in every import. Call it
    before you import a lingvo model, for example in the first lines of your model's module.

    Raises:
        PipelineError: a module with subclasses of lingvo's layers is imported already.

    Example:
        >>> replace_gpipe()  # doctest: +SKIP
        >>> from lingvo.core import layers_with_gpipe  # doctest: +SKIP
    """
    replace_module("lingvo.core.gpipe", "pipemesh.layers")


def replace_module(name: str, source: str) -> None:
    """Replaces a lingvo module by the names of a pipemesh module."""
    package, _, last = name.rpartition(".")
    replaced, ours = importlib.import_module(name), importlib.import_module(source)
    doc = f"The names of {source} in place of lingvo's."
    if replaced.__doc__ == doc:
        return
    names = [n for n in ours.__all__ if hasattr(replaced, n)]
    for cls in filter(inspect.isclass, [getattr(replaced, n) for n in names]):
        for sub in cls.__subclasses__():
            if sub.__module__ != name:
                raise PipelineError(
                    f"{sub.__module__} is imported already, with a {cls.__name__} of {name}; call "
                    "replace_gpipe() before you import it"
                )

    def missing(attribute: str) -> Any:
        raise AttributeError(f"{source} has no {attribute}")

    module = types.ModuleType(name, doc)
    vars(module).update({n: getattr(ours, n) for n in ours.__all__}, __getattr__=missing)
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


def export_to_lingvo(
    checkpoint: str, path: str, stages: Iterable[Any] | None = None, like: str | None = None
) -> str:
    """Writes a checkpoint for lingvo's own pipeline of the same layers.

    It converts weights, optimizer state, moving averages and the step, tensor by tensor, so the
    whole model is never in memory. `lingvo.trainer` resumes from it if `path` is
    `<logdir>/train/ckpt-<step, eight digits>` and the folder has no other checkpoint.

    Args:
        checkpoint: path of a checkpoint of this library, without extension. A lingvo checkpoint
            with another `PartitionSequentialLayers` is also valid.
        path: path of the new checkpoint, without extension.
        stages: params of the stages of lingvo's model (its `cell_tpl`), or the boundaries of the
            stages of `PartitionSequentialLayers`, such as `(0, 3, 7)`. By default those of `like`.
        like: path of a checkpoint of lingvo's model, such as the one of its step 0. The result gets
            the same names. Without it, the result lacks values that only lingvo's model has.

    Returns:
        A line that describes the new checkpoint.

    Raises:
        PipelineError: no variable belongs to a layer of the stages, or a layer to no stage.
        CheckpointError: see `pipemesh.checkpoint.convert`.

    Example:
        >>> theirs = "theirs/train/ckpt-00000300"
        >>> export_to_lingvo("runs/lm/ckpt-300", theirs, stages=(0, 3, 7))  # doctest: +SKIP
    """
    if stages is None:
        if like is None:
            raise PipelineError(
                "neither stages nor like is given; give one, to say what lingvo's stages are"
            )
        stages = boundaries_in(names_of(like))
    # lingvo does not read positions in data.
    names = with_stages(names_of(checkpoint, places=False), stages)
    return convert(checkpoint, path, names, like=like)


def import_from_lingvo(
    checkpoint: str, path: str, stages: Iterable[Any] | None = None, like: str | None = None
) -> str:
    """Converts a checkpoint of lingvo's own pipeline to one of this library, valid under every
    plan.

    Args:
        checkpoint: path of lingvo's checkpoint, without extension.
        path: path of the new checkpoint, without extension.
        stages: params of the stages of that model, if they were written by hand; None for the
            stages of `PartitionSequentialLayers`.
        like: path of a checkpoint of the run that will resume from the new one, such as the one of
            its step 1. It supplies the metadata and the values that lingvo does not save.

    Returns:
        A line that describes the new checkpoint.

    Raises:
        PipelineError: no variable belongs to a stage, or two would get one name.
        CheckpointError: see `pipemesh.checkpoint.convert`.

    Example:
        >>> import_from_lingvo("theirs/train/ckpt-00000300", "runs/lm/ckpt-300")  # doctest: +SKIP
    """
    names = without_stages(names_of(checkpoint), stages)
    return convert(checkpoint, path, names, like=like)


def lingvo_checkpoint_rules(checkpoint: str, stages: Iterable[Any] | None = None) -> dict[str, Any]:
    """Returns `init_from_checkpoint_rules` that load a checkpoint of lingvo's own pipeline.

    The rules restore everything in the checkpoint, including optimizer state and the step, for any
    number of stages. Variables that it lacks are initialized.

    Args:
        checkpoint: path of a checkpoint of a model with `lingvo.core.gpipe`.
        stages: as for `import_from_lingvo`.

    Returns:
        The rules, for `Task().train`.

    Raises:
        PipelineError: no variable of the checkpoint belongs to a stage, or two get one name.
        CheckpointError: lingvo cannot read the checkpoint.

    Example:
        >>> import tempfile
        >>> weight = tf.Variable([1.0])
        >>> saver = tf.compat.v1.train.Saver({"lm/d1/cell_003/w/var": weight})
        >>> path = saver.save(None, tempfile.mkdtemp() + "/ckpt")
        >>> lingvo_checkpoint_rules(path)[path]
        ([('lm/cell_003/w/var(?::0)?$', 'lm/d1/cell_003/w/var')], [])
    """
    if is_pattern(checkpoint):
        raise CheckpointError(
            f"{checkpoint!r}: lingvo reads no checkpoint below a path with [ or \\; move it"
        )
    names = without_stages((name for name, _ in tf.train.list_variables(checkpoint)), stages)
    rules = [
        (f"{re.escape(ours)}(?::0)?$", name.replace("%", "%%"))
        for name, ours in sorted(names.items(), key=lambda pair: pair[1])
    ]
    return {checkpoint: (rules, [])}


def lingvo_names(layer: Any, checkpoint: str | None = None) -> dict[str, Any]:
    """Returns the weights of a layer by the names that `lingvo.core.gpipe` gives them.

    `tf.compat.v1.train.Saver(lingvo_names(layer))` reads and writes lingvo checkpoints. It works in
    graphs and, with None as the session, eagerly.

    Args:
        layer: a layer; stages are searched for at all levels below it.
        checkpoint: path of a checkpoint written by lingvo, under any stages; it supplies the names.
            By default the stages are those of this layer.

    Returns:
        The variables by name.

    Raises:
        PipelineError: the checkpoint lacks a weight, or several variables match one.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4, has_bias=False)
        >>> stages = PartitionSequentialLayers([dense] * 2, 2, tshape.Shape([8, 4]))
        >>> with tf.Graph().as_default():
        ...     stack = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages).Instantiate()
        ...     list(lingvo_names(stack))
        ['d0/cell_000/w/var', 'd1/cell_001/w/var']
    """
    found: dict[int, tuple[Any, str, str]] = {}
    _visit(layer, layer._self_variable_scope.name, (), found)
    if checkpoint is None:
        return {marked.replace("<", ""): variable for variable, _, marked in found.values()}
    names = {}
    known = [name for name, _ in tf.train.list_variables(checkpoint)]
    for variable, ours, marked in found.values():
        theirs = marked.replace("<", "")
        any_stages = re.sub("<[^/]+", "[^/]+", re.escape(marked))
        fitting = [name for name in known if name == ours or re.fullmatch(any_stages, name)]
        if theirs in known:
            fitting = [theirs]
        if len(fitting) != 1:
            few = ", ".join(sorted(fitting or known)[:3])
            raise PipelineError(
                f"{checkpoint}: {'several variables may be' if fitting else 'no variable is'} "
                f"{ours!r}, which lingvo calls {theirs!r} with these stages; "
                f"{'they are' if fitting else 'it has'} {few}"
                f"{', ...' if len(fitting or known) > 3 else ''}"
            )
        names[fitting[0]] = variable
    return names


def _visit(
    layer: Any,
    theirs: str,
    above: tuple[tuple[str, str], ...],
    found: dict[int, tuple[Any, str, str]],
) -> None:
    """Adds all variables at and below a layer, with their names here and in lingvo.

    `theirs` is the scope of the layer in lingvo, and `above` has the scopes of the layers around
    it, here and in lingvo, innermost first. In lingvo's names `<` marks the names of stages.
    """
    in_stage = isinstance(layer, FeatureExtractionLayer)
    if in_stage:
        head, slash, stage = theirs.rpartition("/")
        theirs = f"{head}{slash}<{stage}"
    above = ((layer._self_variable_scope.name, theirs), *above)

    def translate(name: str) -> str:
        for ours, other in above:
            if not ours or name.startswith(f"{ours}/"):
                return other + name.removeprefix(ours)
        return name

    for variable in py_utils.Flatten(layer._private_vars):
        name = variable.name.removesuffix(":0")
        found.setdefault(id(variable), (variable, name, translate(name)))
    given = layer.params.child_variable_scope_override
    for name, children in layer.children.items():
        for child in py_utils.Flatten(children):
            ours = child._self_variable_scope.name
            last = ours.rpartition("/")[2]
            inside = in_stage and name not in given
            _visit(child, f"{theirs}/{last}" if inside else translate(ours), above, found)
