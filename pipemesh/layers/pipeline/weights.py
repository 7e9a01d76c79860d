"""Weights of stages: their dtypes, their replicas, and weights that stages share."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.devices import device_of_scope, is_device
from pipemesh.backend.gradients import custom_gradient
from pipemesh.backend.static_shape import num_bytes
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer, is_stage
from pipemesh.layers.named import NamedLayer
from pipemesh.layers.named.weight_slices import stays
from pipemesh.mesh import Mesh
from pipemesh.recurrent import Home
from pipemesh.recurrent.options import cast_floating
from pipemesh.text import nearest_text


def uncast_theta(layer: Any) -> Any:
    """Returns the weights of a layer and its children in the dtype of their variables."""
    theta = py_utils.Transform(uncast_theta, layer.children)
    theta.update(_private(layer))
    return theta


def with_frozen(layer: Any, theta: Any, frozen: Collection[Any]) -> Any:
    """Returns a layer's theta with `tf.stop_gradient` before the variables with `frozen` refs.

    A stage recognizes such weights: it has no backward pass for them, nor below the lowest other.
    """

    def stopped(weight: Any, value: Any) -> Any:
        if not (isinstance(weight, tf.Variable) and weight.ref() in frozen):
            return value
        with tf.device(weight.device or None):
            return tf.stop_gradient(value)

    return py_utils.Transform(stopped, uncast_theta(layer), theta)


def compute_dtypes(layer: Any) -> Any:
    """Returns the dtype of each weight in its layer's `theta`, nested as the theta."""
    dtypes = py_utils.Transform(compute_dtypes, layer.children)
    p = layer.params

    def of(weight: Any) -> tf.DType:
        dtype = tf.as_dtype(weight.dtype).base_dtype
        return dtype if p.fprop_dtype is None or dtype != p.dtype else tf.as_dtype(p.fprop_dtype)

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


@contextlib.contextmanager
def spread_weights(home: Home) -> Iterator[None]:
    """Spreads variables that are made inside, eagerly, over the replicas of a stage.

    Each goes to the replica with the fewest bytes so far, at the same position among its devices.
    Its optimizer state and the sum of all replicas' gradients are there. The other replicas get its
    value from there once a step: stage 1 of ZeRO (Rajbhandari et al., 2020), weight by weight.
    Slices of weights that named layers cut over the replicas are not moved.
    """
    held: collections.Counter[int] = collections.Counter()

    def create(make: Callable[..., Any], **kwargs: Any) -> Any:
        here = device_of_scope()
        places = [n for n, name in enumerate(home.replica(0)) if here and is_device(here, name)]
        if stays() or not places:
            return make(**kwargs)
        devices = [home.replica(number)[places[0]] for number in range(home.num_replicas)]
        number = min(range(len(devices)), key=lambda n: held[n * home.group + places[0]])
        with tf.device(devices[number]):
            variable = make(**kwargs)
        held[number * home.group + places[0]] += num_bytes([variable])
        return variable

    if home.num_replicas == 1:
        yield
        return
    with tf.compat.v1.variable_creator_scope(create):
        yield


def replica_of(variable: Any, home: Home) -> int:
    """Returns the number of the replica that a variable is on; 0 if it is on none."""
    pinned = getattr(variable, "device", None)
    if not pinned or home.num_replicas == 1:
        return 0
    numbers = [n for n, device in enumerate(home.devices) if is_device(pinned, device)]
    return numbers[0] // home.group if numbers else 0


def with_given_weights(owner: str, tied: Any, params: Sequence[Any]) -> list[Any]:
    """Copies params of stages whose layers do not make the weights that `tied` gives them."""
    if not isinstance(tied, Mapping):
        raise PipelineError(
            f"{owner}: tied_weights is {tied!r}; it is a dict such as "
            "{'softmax.w': 'embedding.table'}"
        )
    if not tied:
        return list(params)
    tied_by_layer: dict[str, list[str]] = {}
    for target, source in tied.items():
        layer, weight = _parse(owner, target)
        tied_by_layer.setdefault(layer, []).append(weight)
        if source in tied:
            raise PipelineError(
                f"{owner}: tied_weights gives {target!r} the weight {source!r}, which is given "
                f"itself; name the one that is made: {tied[source]!r}"
            )
        _parse(owner, source)
    names: list[str] = []
    changed = [_changed(owner, p, tied_by_layer, names) for p in params]
    for layer in tied_by_layer:
        _check_known(owner, layer, names)
    return changed


def _changed(
    owner: str,
    p: Any,
    tied_by_layer: Mapping[str, list[str]],
    names: list[str],
    prefix: str = "",
) -> Any:
    """Returns params whose layers do not make what they are given; adds all layers' `names`."""
    if is_stage(p):
        p = p.Copy()
        p.sub = [
            _changed(owner, sub, tied_by_layer, names, p.variable_name_prefix) for sub in p.sub
        ]
        return p
    name = prefix + p.name
    names.append(name)
    if name in tied_by_layer and issubclass(p.cls, NamedLayer):
        p = p.Copy()
        for path in tied_by_layer[name]:
            part = _part(owner, p, path, lambda p, child: getattr(p, f"{child}_tpl", None))
            weight = path.rpartition(".")[2]
            part.given_weights = (*part.given_weights, weight)
    return p


def _part(owner: str, layer: Any, path: str, child_of: Callable[[Any, str], Any]) -> Any:
    """Returns the part of a layer, or of its params, that has the weight of a path."""
    *parts, weight = path.split(".")
    for name in parts:
        part = child_of(layer, name)
        if part is None:
            kind = getattr(layer, "cls", type(layer)).__name__
            raise PipelineError(
                f"{owner}: tied_weights: a {kind} has no part {name!r} for {path!r} to take or "
                f"give {weight!r}; name its template without '_tpl', such as 'attention'"
            )
        layer = part
    return layer


def tie_weights(
    owner: str,
    tied: Mapping[str, str],
    layers: Sequence[Any],
    stages: Iterable[tuple[Any, Mesh | None]],
) -> None:
    """Gives the layers of a stack the weights that they share, which must be cut in the same way.

    `stages` are those of the layers that lie on meshes of their own, with these.
    """
    known = [leaf for layer in layers for leaf in _leaves(layer)]
    meshes = {leaf.params.name: mesh for stage, mesh in stages for leaf in _leaves(stage)}
    for target, source in tied.items():
        (to, name), (of, weight) = _parse(owner, target), _parse(owner, source)
        taker, giver = _found(owner, to, known), _found(owner, of, known)
        if to in meshes and of in meshes and meshes[to] != meshes[of]:
            raise LayoutError(
                f"{owner}: tied_weights gives {target!r} the weight {source!r}, but replicas of "
                f"the one's stage are the mesh '{meshes[to]}', of the other's '{meshes[of]}', so "
                "it cannot be cut alike; put both into stages of equal homes"
            )
        taker, giver = (
            _part(owner, layer, path, lambda layer, child: layer.children.get(child))
            for layer, path in ((taker, name), (giver, weight))
        )
        taker.ShareWeight(name.rpartition(".")[2], giver, weight.rpartition(".")[2])


def _leaves(layer: Any) -> Iterator[Any]:
    if not isinstance(layer, FeatureExtractionLayer):
        yield layer
        return
    for child in layer.children.values():
        yield from _leaves(child)


def _parse(owner: str, text: Any) -> tuple[str, str]:
    """Returns the name of a layer of the stack, and the path of a weight in it."""
    layer, _, path = text.partition(".") if isinstance(text, str) else ("", "", "")
    if not (layer and all(path.split("."))):
        raise PipelineError(
            f"{owner}: tied_weights has {text!r}; write the name of a layer, a dot, and that of "
            "its weight, such as 'embedding.table', or 'block.attention.relative_bias'"
        )
    return layer, path


def _check_known(owner: str, name: str, names: Sequence[str]) -> None:
    count = names.count(name)
    if count != 1:
        hint = "; give each a name of its own" if count else nearest_text(name, names)
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
