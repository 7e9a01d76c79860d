"""The weights of alike layers, each at its layer's position along the axis `layers`."""

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
    """Returns the stacked weights of all alike layers, by path.

    `cells` has the theta and the layers of each stage. Paths begin with `prefix`.
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
    """Stacks a weight of alike layers, each where its layer is.

    `held` has the weights of the layers at each position along the axis `layers`, as slices on its
    processors. The shape has the dims of the stack in front.
    """
    slices: dict[int, tf.Tensor] = {}
    sizes = lowering.tensor_layout(shape).slice_shape
    for place, layers in enumerate(held):
        for i, processor in enumerate(lowering.mesh.stage_processors(place)):
            with tf.device(lowering.devices[processor]):
                slices[processor] = tf.reshape(tf.stack([layer[i] for layer in layers]), sizes)
    return Tensor(lowering, tuple(slices[i] for i in sorted(slices)), shape)
