"""Conversion of names between checkpoints of `lingvo.core.gpipe` and of this library.

lingvo puts the name of the stage into the names of variables (`d0/cell_003/w/var`), so its
checkpoints fit one partition only. Here they are `cell_003/w/var` under every partition. This
module converts between both.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, NamedTuple

import lingvo.compat as tf
from lingvo.core import py_utils

from pipemesh.checkpoint.conversion import convert, names_of
from pipemesh.checkpoint.files import is_pattern
from pipemesh.errors import CheckpointError, PipelineError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.lingvo_stages import boundaries_in, with_stages, without_stages


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
            stages of `PartitionSequentialLayers`: `(0, 3, 7)` is a stage of the first three layers
            and one of the next four. By default the stages of `like`.
        like: path of a checkpoint of lingvo's model, such as the one of its step 0. The result gets
            the same names. Without it, the result lacks values that only lingvo's model has.

    Returns:
        A line that describes the new checkpoint.

    Raises:
        PipelineError: no variable belongs to a layer of the stages, or a layer to no stage.
        CheckpointError: see `pipemesh.checkpoint.convert`.

    Example:
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> state = {"lm/cell_003/w/var": tf.Variable([1.0]), "global_step": tf.Variable(300)}
        >>> ours = tf.compat.v1.train.Saver(state).save(None, os.path.join(folder, "ours"))
        >>> theirs = os.path.join(folder, "train", "ckpt-00000300")
        >>> told = export_to_lingvo(ours, theirs, stages=(0, 3, 7))
        >>> tf.train.list_variables(tf.train.latest_checkpoint(os.path.dirname(theirs)))
        [('global_step', []), ('lm/d1/cell_003/w/var', [1])]
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
        >>> import os, tempfile
        >>> folder = tempfile.mkdtemp()
        >>> weight = {"lm/d1/cell_003/w/var": tf.Variable([1.0])}
        >>> theirs = tf.compat.v1.train.Saver(weight).save(None, os.path.join(folder, "theirs"))
        >>> told = import_from_lingvo(theirs, os.path.join(folder, "ours"))
        >>> tf.train.list_variables(os.path.join(folder, "ours"))
        [('lm/cell_003/w/var', [1])]
    """
    names = without_stages(names_of(checkpoint), stages)
    return convert(checkpoint, path, names, like=like)


def lingvo_checkpoint_rules(checkpoint: str, stages: Iterable[Any] | None = None) -> dict[str, Any]:
    """Returns `init_from_checkpoint_rules` that load a checkpoint of lingvo's own pipeline.

    The rules restore everything in the checkpoint, including optimizer state and the step, for any
    number of stages. Variables that it lacks are initialized.

    Args:
        checkpoint: path of a checkpoint of a model with `lingvo.core.gpipe`.
        stages: params of the stages of that model, if they were written by hand; None for the
            stages of `PartitionSequentialLayers`.

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


class _Scope(NamedTuple):
    """A variable scope: its name here, its name in lingvo, and a pattern for any stage names."""

    ours: str
    theirs: str
    pattern: str

    def translate(self, name: str) -> _Scope | None:
        """Returns the scope of a name below this scope, or None for other names."""
        rest = name.removeprefix(self.ours)
        if self.ours and (rest == name or not rest.startswith("/")):
            return None
        return _Scope(name, self.theirs + rest, self.pattern + re.escape(rest))


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
    """Adds the scopes of all variables at and below a layer."""
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
    """Returns the pattern of a stage's scope, for any name of the stage."""
    name = re.escape(scope.theirs.rsplit("/", 1)[-1])
    return scope.pattern.removesuffix(name) + "[^/]+"
