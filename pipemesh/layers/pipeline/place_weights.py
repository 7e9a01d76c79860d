"""The weights of alike layers, each on the place along the axis `layers` that has its layer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.layers.named import lowering_scope
from pipemesh.layers.pipeline.all_weights import named_weights
from pipemesh.lowering import PlacementLowering, Tensor
from pipemesh.lowering.lowering import Slices
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS


def alike_weights(
    lowering: PlacementLowering,
    cells: Sequence[tuple[Any, Sequence[Any]]],
    shapes: Mapping[str, Shape],
    prefix: str,
) -> dict[str, Tensor]:
    """The weights of all alike layers, stacked, by path.

    Args:
        lowering: of the whole mesh.
        cells: the theta of each stage, and its layers.
        shapes: of the stacked weights, by path.
        prefix: what paths begin with.
    """
    mesh = lowering.mesh
    inner = LayoutRules(tuple(rule for rule in lowering.rules.rules if rule[1] != LAYERS_AXIS))
    # For each place the weights of its layers, by path.
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
    """A weight of alike layers, each where its layer is.

    Args:
        lowering: of the whole mesh.
        held: for each place along the axis `layers` the weights of its layers: what the processors
            of the place have of them.
        shape: of the weights of all layers, with the dims of the stack in front.
    """
    slices: dict[int, tf.Tensor] = {}
    sizes = lowering.tensor_layout(shape).slice_shape
    for place, layers in enumerate(held):
        for i, processor in enumerate(lowering.mesh.stage_processors(place)):
            with tf.device(lowering.devices[processor]):
                slices[processor] = tf.reshape(tf.stack([layer[i] for layer in layers]), sizes)
    return Tensor(lowering, tuple(slices[i] for i in sorted(slices)), shape)
