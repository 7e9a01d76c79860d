"""Checkpoints of `lingvo.core.gpipe`: which of its names is which of ours.

lingvo puts the name of the stage into the names of variables (`d0/cell_003/w/var`), so that its
checkpoints fit one partition only. Here they are `cell_003/w/var` under every partition, and this
module says what they are in a checkpoint that lingvo has written, or can read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import lingvo.compat as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer, is_stage
from pipemesh.layers.layer_names import places_of, scopes_of

# What PartitionSequentialLayers calls stages and layers.
_PARTITIONED = re.compile(r"(?<![^/])d\d+/(?=cell_\d{3,}/)")


def lingvo_checkpoint_rules(checkpoint: str, stages: Iterable[Any] | None = None) -> dict[str, Any]:
    """What `init_from_checkpoint_rules` must be for weights to come from lingvo's own pipeline.

    All that the checkpoint has is restored, the state of optimizers and the step as well, into
    whatever number of stages; what the model has beyond it is initialized.

    Args:
        checkpoint: path of a checkpoint that a model with `lingvo.core.gpipe` wrote.
        stages: params of the stages of that model, if they were written by hand; leave it out
            for those of `PartitionSequentialLayers`.

    Returns:
        The rules, to be set in `Task().train`.

    Raises:
        PipelineError: no variable of the checkpoint lies in a stage, or two lie in one place.

    Example:
        >>> import tempfile
        >>> weight = tf.Variable([1.0])
        >>> saver = tf.compat.v1.train.Saver({"lm/d1/cell_003/w/var": weight})
        >>> path = saver.save(None, tempfile.mkdtemp() + "/ckpt")
        >>> lingvo_checkpoint_rules(path)[path]
        ([('lm/cell_003/w/var(?::0)?$', 'lm/d1/cell_003/w/var')], [])
    """
    names = {}
    ours_of = _renaming(list(stages)) if stages is not None else _without_stage
    theirs = [name for name, _ in tf.train.list_variables(checkpoint)]
    for name in theirs:
        ours = ours_of(name)
        if ours in names:
            raise PipelineError(
                f"{checkpoint}: {names[ours]!r} and {name!r} would both be {ours!r}; give the "
                "params of the stages that wrote it (stages=...)"
            )
        names[ours] = name
    if all(ours == name for ours, name in names.items()):
        raise PipelineError(
            f"{checkpoint}: no variable lies in a stage (such as d0/cell_000/...), as "
            f"lingvo.core.gpipe writes them; the first is {theirs[0] if theirs else 'missing'!r}. "
            "Give the params of the stages if they were written by hand (stages=...); a checkpoint "
            "of this library needs no rules"
        )
    rules = [
        (f"{re.escape(ours)}(?::0)?$", name.replace("%", "%%"))
        for ours, name in sorted(names.items())
    ]
    return {checkpoint: (rules, [])}


def _without_stage(name: str) -> str:
    return _PARTITIONED.sub("", name)


def _renaming(stages: list[Any]) -> Any:
    places = places_of(stages, is_stage)
    pairs = [
        ("/".join((*place.stages, place.name)), "/".join((*scope, place.name)))
        for place, scope in zip(places, scopes_of(places), strict=True)
        if place.stages and not place.scope_is_given
    ]

    def rename(name: str) -> str:
        for theirs, ours in pairs:
            found = re.search(rf"(?<![^/]){re.escape(theirs)}(?=/)", name)
            if found:
                return name[: found.start()] + ours + name[found.end() :]
        return name

    return rename


class _Scope(NamedTuple):
    """A variable scope: here, in lingvo, and in lingvo whatever the stages are called."""

    ours: str
    theirs: str
    pattern: str

    def translate(self, name: str) -> _Scope | None:
        """A name below this scope; None if it is not."""
        rest = name.removeprefix(self.ours)
        if self.ours and (rest == name or not rest.startswith("/")):
            return None
        return _Scope(name, self.theirs + rest, self.pattern + re.escape(rest))


def lingvo_names(layer: Any, checkpoint: str | None = None) -> dict[str, Any]:
    """The weights of a layer by the names that a model with `lingvo.core.gpipe` gives them.

    `tf.compat.v1.train.Saver(lingvo_names(layer))` writes and reads checkpoints of lingvo, in
    graphs and, with None as the session, eagerly.

    Args:
        layer: a layer; stages are looked for in all that is below it.
        checkpoint: path of a checkpoint written by lingvo: names are as in there, whatever stages
            it was written with. By default the stages are those of this layer.

    Raises:
        PipelineError: the checkpoint lacks a weight, or has several that it may be.

    Example:
        >>> from lingvo.core import layers, py_utils, tshape
        >>> from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4, has_bias=False)
        >>> stages = PartitionSequentialLayers([dense] * 2, 2, tshape.Shape([8, 4]))
        >>> with tf.Graph().as_default():
        ...     stack = PipeliningLayer.Params().Set(name="stack", cell_tpl=stages).Instantiate()
        ...     list(lingvo_names(stack))
        ['d0/cell_000/w/var', 'd1/cell_001/w/var']
    """
    found: dict[int, tuple[_Scope, Any]] = {}
    _visit(layer, None, (), found)
    if checkpoint is None:
        return {scope.theirs: variable for scope, variable in found.values()}
    shapes = dict(tf.train.list_variables(checkpoint))
    names = {}
    for scope, variable in found.values():
        fitting = [
            name
            for name in shapes
            if name in (scope.ours, scope.theirs) or re.fullmatch(scope.pattern, name)
        ]
        if scope.theirs in fitting:
            fitting = [scope.theirs]
        if len(fitting) != 1:
            few = ", ".join(sorted(fitting or shapes)[:3])
            raise PipelineError(
                f"{checkpoint}: {'several variables may be' if fitting else 'no variable is'} "
                f"{scope.ours!r}, which lingvo calls {scope.theirs!r} with these stages; "
                f"{'they are' if fitting else 'it has'} {few}"
                f"{', ...' if len(fitting or shapes) > 3 else ''}"
            )
        names[fitting[0]] = variable
    return names


def _visit(layer: Any, scope: _Scope | None, above: tuple[_Scope, ...], found: Any) -> None:
    """Adds the scopes of all variables at and below a layer whose own scope is given."""
    if scope is None:
        name = layer._self_variable_scope.name
        scope = _Scope(name, name, re.escape(name))
        if isinstance(layer, FeatureExtractionLayer):
            scope = scope._replace(pattern=_any_stage(scope))
    above = (*above, scope)

    def translate(name: str) -> _Scope:
        for outer in reversed(above):
            below = outer.translate(name)
            if below is not None:
                return below
        return _Scope(name, name, re.escape(name))

    for variable in py_utils.Flatten(layer._private_vars):
        found.setdefault(id(variable), (translate(variable.name.removesuffix(":0")), variable))
    in_stage = isinstance(layer, FeatureExtractionLayer)
    given = layer.params.child_variable_scope_override
    for name, children in layer.children.items():
        for child in py_utils.Flatten(children):
            ours = child._self_variable_scope.name
            child_scope = translate(ours)
            if in_stage and name not in given:
                last = "/" + ours.rsplit("/", 1)[-1]
                child_scope = _Scope(ours, scope.theirs + last, scope.pattern + re.escape(last))
            if isinstance(child, FeatureExtractionLayer):
                child_scope = child_scope._replace(pattern=_any_stage(child_scope))
            _visit(child, child_scope, above, found)


def _any_stage(scope: _Scope) -> str:
    """The pattern of a stage's scope, for any name of the stage."""
    name = re.escape(scope.theirs.rsplit("/", 1)[-1])
    return scope.pattern.removesuffix(name) + "[^/]+"
