"""Weights of stages: their dtypes, and weights that stages share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.gradients import custom_gradient
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer, is_stage
from pipemesh.layers.named import NamedLayer
from pipemesh.mesh import Mesh
from pipemesh.recurrent.options import cast_floating
from pipemesh.text import nearest_text


def uncast_theta(layer: Any) -> Any:
    """Returns the weights of a layer and its children in the dtype of their variables."""
    theta = py_utils.Transform(uncast_theta, layer.children)
    theta.update(_private(layer))
    return theta


def compute_dtypes(layer: Any) -> Any:
    """Returns the dtype of each weight in its layer's `theta`, nested as the theta."""
    dtypes = py_utils.Transform(compute_dtypes, layer.children)
    p = layer.params

    def of(weight: Any) -> tf.DType:
        own = tf.as_dtype(weight.dtype).base_dtype
        return own if p.fprop_dtype is None or own != p.dtype else tf.as_dtype(p.fprop_dtype)

    dtypes.update(py_utils.Transform(of, _private(layer)))
    return dtypes


def plain_theta(stack: Any, theta: Any, names: Sequence[str]) -> Any:
    """Returns weights as the layers of a stack compute with them, without a pipeline.

    Their gradients are dense, as in a pipeline. lingvo's clipping computes the wrong norm of a
    sparse gradient in which a row occurs twice.
    """

    def plain(weight: Any, dtype: tf.DType) -> Any:
        if not stack.do_eval and weight.dtype.is_floating:
            weight = _with_dense_gradient(weight)
        return cast_floating(weight, dtype)

    ready = {
        name: py_utils.Transform(plain, theta[name], compute_dtypes(stack.children[name]))
        for name in names
    }
    return py_utils.NestedMap({**theta, **ready})


@custom_gradient
def _with_dense_gradient(weight: tf.Tensor) -> Any:
    return tf.identity(weight), tf.convert_to_tensor


def cast_first(p: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Casts the first argument to the dtype that the stages compute in."""
    if not args or args[0] is None or p.nested_map_fprop:
        return args
    return cast_floating(tf.convert_to_tensor(args[0]), p.fprop_dtype), *args[1:]


def _private(layer: Any) -> Any:
    return py_utils.NestedMap(layer._private_theta) | layer._extra_theta


def with_given_weights(owner: str, tied: Any, params: Sequence[Any]) -> list[Any]:
    """Returns params of stages whose layers do not make the weights that `tied` gives them.

    `tied` maps each `layer.weight` that is given to the one that is made. Params that change are
    copied.

    Raises:
        PipelineError: a name is invalid, or there is no such layer with named dims.
    """
    if not isinstance(tied, Mapping):
        raise PipelineError(
            f"{owner}: tied_weights is {tied!r}; it is a dict such as "
            "{'softmax.w': 'embedding.table'}"
        )
    if not tied:
        return list(params)
    given: dict[str, list[str]] = {}
    for target, source in tied.items():
        layer, weight = _parse(owner, target)
        given.setdefault(layer, []).append(weight)
        if source in tied:
            raise PipelineError(
                f"{owner}: tied_weights gives {target!r} the weight {source!r}, which is given "
                f"itself; name the one that is made: {tied[source]!r}"
            )
        _parse(owner, source)
    changed = [_changed(p, given) for p in params]
    names = [name for p in params for name in _names(p)]
    for layer in given:
        _check_known(owner, layer, names)
    return changed


def _changed(p: Any, given: Mapping[str, list[str]]) -> Any:
    if is_stage(p):
        p = p.Copy()
        p.sub = [_changed(sub, given) for sub in p.sub]
    elif p.name in given and issubclass(p.cls, NamedLayer):
        p = p.Copy().Set(given_weights=tuple(given[p.name]))
    return p


def _names(p: Any) -> list[str]:
    return [name for sub in p.sub for name in _names(sub)] if is_stage(p) else [p.name]


def tie_weights(owner: str, tied: Mapping[str, str], layers: Sequence[Any]) -> None:
    """Gives the layers of a stack the weights that they share.

    Raises:
        PipelineError: there is no such layer with named dims.
        ShapeError: a layer has no such weight.
        LayoutError: the dims of two weights differ.
    """
    known = [leaf for layer in layers for leaf in _leaves(layer)]
    for target, source in tied.items():
        (to, name), (of, weight) = _parse(owner, target), _parse(owner, source)
        _found(owner, to, known).ShareWeight(name, _found(owner, of, known), weight)


def check_one_mesh(
    owner: str, tied: Mapping[str, str], stages: Sequence[tuple[Any, Mesh | None]]
) -> None:
    """Checks that layers share weights only if these are cut in the same way.

    Raises:
        LayoutError: the replicas of two stages that share a weight have different meshes.
    """
    meshes = {leaf.params.name: mesh for stage, mesh in stages for leaf in _leaves(stage)}
    for pair in tied.items():
        names = [_parse(owner, text)[0] for text in pair]
        here, there = (meshes.get(name) for name in names)
        if here != there and all(name in meshes for name in names):
            raise LayoutError(
                f"{owner}: tied_weights gives {pair[0]!r} the weight {pair[1]!r}, but replicas of "
                f"the one's stage are the mesh '{here}', of the other's '{there}', so it cannot be "
                "cut alike; put both into stages of equal homes"
            )


def _leaves(layer: Any) -> Iterator[Any]:
    if not isinstance(layer, FeatureExtractionLayer):
        yield layer
        return
    for child in layer.children.values():
        yield from _leaves(child)


def _parse(owner: str, text: Any) -> tuple[str, str]:
    layer, dot, weight = text.rpartition(".") if isinstance(text, str) else ("", "", "")
    if not (layer and dot and weight):
        raise PipelineError(
            f"{owner}: tied_weights has {text!r}; write the name of a layer, a dot, and that of "
            "its weight, such as 'embedding.table'"
        )
    return layer, weight


def _check_known(owner: str, name: str, names: Sequence[str]) -> None:
    count = names.count(name)
    if count != 1:
        hint = nearest_text(name, names) if not count else "; give each a name of its own"
        raise PipelineError(
            f"{owner}: tied_weights names the layer {name!r}, of which there are {count}{hint}"
        )


def _found(owner: str, name: str, layers: Sequence[Any]) -> NamedLayer:
    _check_known(owner, name, [layer.params.name for layer in layers])
    layer = next(layer for layer in layers if layer.params.name == name)
    if not isinstance(layer, NamedLayer):
        raise PipelineError(
            f"{owner}: tied_weights names {name!r}, a {type(layer).__name__}, but only layers with "
            "named dims take and give weights so; for others set child_variable_scope_override of "
            "both stages"
        )
    return layer
