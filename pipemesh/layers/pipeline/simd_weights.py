"""Weights with named dims by path, and those of alike layers stacked on their devices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.named import NamedLayer, lowering_scope
from pipemesh.lowering import PlacementLowering, Tensor
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS


def check_named(owner: str, layer: Any) -> None:
    """Raises a PipelineError if a weight of an alike layer has no named dims."""
    named = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
    for name in layer.vars:
        if name not in layer.children and name not in named:
            raise PipelineError(
                f"{owner}: weight {name!r} of {layer.path!r}, a {type(layer).__name__} in the "
                "alike layers, has no named dims, so lowering='simd' cannot stack it; make it by "
                "NamedWeights of a NamedLayer, or use lowering='placement'"
            )
    for _, child, _ in _children(layer, None):
        check_named(owner, child)


def named_shapes(layer: Any, path: str = "") -> dict[str, Shape]:
    """Returns the shapes of the whole weights; `path` is the prefix of their paths."""
    own = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    found = {path + name: shape for name, shape in own.items()}
    for name, child, _ in _children(layer, None):
        found |= named_shapes(child, f"{path}{name}.")
    return found


def named_weights(layer: Any, theta: Any, path: str = "") -> dict[str, Tensor]:
    """Returns the weights, under the current lowering; `path` is the prefix of their paths."""
    own = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    found = {path + name: layer.Weight(theta, name) for name in own}
    for name, child, weights in _children(layer, theta):
        found |= named_weights(child, weights, f"{path}{name}.")
    return found


def theta_of(layer: Any, weight: Callable[[str], Tensor], theta: Any, path: str = "") -> Any:
    """Builds a layer's theta from the weights by path, and `theta` of those without named dims."""
    if isinstance(layer, NamedLayer):
        found = py_utils.NestedMap({name: weight(path + name) for name in layer.named_shapes})
    else:
        own = {} if theta is None else theta
        found = py_utils.NestedMap({k: v for k, v in own.items() if k not in layer.children})
    parts = iter(
        [
            theta_of(child, weight, weights, f"{path}{name}.")
            for name, child, weights in _children(layer, theta)
        ]
    )
    for name, child in layer.children.items():
        is_list = isinstance(child, list | tuple)
        found[name] = [next(parts) for _ in child] if is_list else next(parts)
    return found


def _children(layer: Any, theta: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the children of a layer, including those in lists, with names and weights."""
    for name, child in layer.children.items():
        own = None if theta is None else theta[name]
        if not isinstance(child, list | tuple):
            yield name, child, own
            continue
        for number, part in enumerate(child):
            yield f"{name}[{number}]", part, None if own is None else own[number]


def alike_weights(
    lowering: PlacementLowering,
    cells: Sequence[tuple[Any, Sequence[Any]]],
    shapes: Mapping[str, Shape],
    prefix: str,
) -> dict[str, Tensor]:
    """Returns the stacked weights of all alike layers, by path with the prefix.

    `cells` has the theta and the layers of each stage.
    """
    mesh = lowering.mesh
    inner = LayoutRules(tuple(rule for rule in lowering.rules.rules if rule[1] != LAYERS_AXIS))
    # The weights of the layers at each position, by path.
    held: list[list[dict[str, Tensor]]] = [[] for _ in range(mesh.num_stages)]
    for number, (theta, layers) in enumerate(cells):
        place = number % mesh.num_stages
        devices = [lowering.devices[i] for i in mesh.stage_processors(place)]
        with lowering_scope(PlacementLowering(mesh.stage_mesh, inner, devices)):
            held[place] += [named_weights(layer, theta[layer.params.name]) for layer in layers]
    found: dict[str, Tensor] = {}
    for path in held[0][0]:
        slices = [[layer[path].slices for layer in weights] for weights in held]
        found[prefix + path] = stacked_weight(lowering, slices, shapes[prefix + path])
    return found


def stacked_weight(
    lowering: PlacementLowering, held: Sequence[Sequence[Slices]], shape: Shape
) -> Tensor:
    """Stacks a weight of alike layers, each where its layer is; `shape` has the stack's dims.

    `held` has the slices of the layers at each position along the axis `layers`.
    """
    slices: dict[int, tf.Tensor] = {}
    sizes = lowering.tensor_layout(shape).slice_shape
    for place, layers in enumerate(held):
        for i, processor in enumerate(lowering.mesh.stage_processors(place)):
            with tf.device(lowering.devices[processor]):
                slices[processor] = tf.reshape(tf.stack([layer[i] for layer in layers]), sizes)
    return Tensor(lowering, tuple(slices[i] for i in sorted(slices)), shape)
