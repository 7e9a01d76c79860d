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
    layer_shapes = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    shapes = {path + name: shape for name, shape in layer_shapes.items()}
    for name, child, _ in _children(layer, None):
        shapes |= named_shapes(child, f"{path}{name}.")
    return shapes


def named_weights(layer: Any, theta: Any, path: str = "") -> dict[str, Tensor]:
    """Returns the weights, under the current lowering; `path` is the prefix of their paths."""
    names = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    weights = {path + name: layer.Weight(theta, name) for name in names}
    for name, child, child_theta in _children(layer, theta):
        weights |= named_weights(child, child_theta, f"{path}{name}.")
    return weights


def theta_of(layer: Any, weight: Callable[[str], Tensor], theta: Any, path: str = "") -> Any:
    """Builds a layer's theta from the weights by path, and `theta` of those without named dims."""
    if isinstance(layer, NamedLayer):
        nested = py_utils.NestedMap({name: weight(path + name) for name in layer.named_shapes})
    else:
        unnamed = {} if theta is None else theta
        nested = py_utils.NestedMap({k: v for k, v in unnamed.items() if k not in layer.children})
    parts = iter(
        [
            theta_of(child, weight, weights, f"{path}{name}.")
            for name, child, weights in _children(layer, theta)
        ]
    )
    for name, child in layer.children.items():
        is_list = isinstance(child, list | tuple)
        nested[name] = [next(parts) for _ in child] if is_list else next(parts)
    return nested


def _children(layer: Any, theta: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields the children of a layer, including those in lists, with names and weights."""
    for name, child in layer.children.items():
        weights = None if theta is None else theta[name]
        if not isinstance(child, list | tuple):
            yield name, child, weights
            continue
        for number, part in enumerate(child):
            yield f"{name}[{number}]", part, None if weights is None else weights[number]


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
        position = number % mesh.num_stages
        devices = [lowering.devices[i] for i in mesh.stage_processors(position)]
        with lowering_scope(PlacementLowering(mesh.stage_mesh, inner, devices)):
            held[position] += [named_weights(layer, theta[layer.params.name]) for layer in layers]
    stacked: dict[str, Tensor] = {}
    for path in held[0][0]:
        slices = [[layer[path].slices for layer in weights] for weights in held]
        stacked[prefix + path] = stacked_weight(lowering, slices, shapes[prefix + path])
    return stacked


def stacked_weight(
    lowering: PlacementLowering, held: Sequence[Sequence[Slices]], shape: Shape
) -> Tensor:
    """Stacks a weight of alike layers, each where its layer is; `shape` has the stack's dims.

    `held` has the slices of the layers at each position along the axis `layers`.
    """
    slices: dict[int, tf.Tensor] = {}
    sizes = lowering.tensor_layout(shape).slice_shape
    for position, layers in enumerate(held):
        for i, processor in enumerate(lowering.mesh.stage_processors(position)):
            with tf.device(lowering.devices[processor]):
                slices[processor] = tf.reshape(tf.stack([layer[i] for layer in layers]), sizes)
    return Tensor(lowering, tuple(slices[i] for i in sorted(slices)), shape)
