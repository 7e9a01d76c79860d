"""The weights of alike layers, of the places along the axis `layers` that compute here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.layers.named import lowering_scope
from pipemesh.layers.pipeline.all_weights import named_weights
from pipemesh.lowering import PlacementLowering, Tensor
from pipemesh.lowering.lowering import Slices
from pipemesh.lowering.simd.process_lowering import placed
from pipemesh.mesh import LayoutRules, Shape
from pipemesh.mesh.mesh import LAYERS_AXIS


def of_place(lowering: PlacementLowering, place: int) -> tuple[PlacementLowering, list[int]]:
    """The lowering of a place along the axis `layers`, and its processors that compute here.

    Args:
        lowering: of the whole mesh.
        place: the number of the place.
    """
    mesh = lowering.mesh
    inner = LayoutRules(tuple(rule for rule in lowering.rules.rules if rule[1] != LAYERS_AXIS))
    own = mesh.stage_processors(place)
    there = placed(mesh.stage_mesh, inner, [lowering.places[i] for i in own])
    return there, [own[i] for i in there.processors]


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
    # For each place that is here its processors, and the weights of its layers, by path.
    held: dict[int, tuple[list[int], list[dict[str, Tensor]]]] = {}
    for number, (theta, layers) in enumerate(cells):
        place = number % lowering.mesh.num_stages
        there, processors = of_place(lowering, place)
        if not processors:
            continue
        _, weights = held.setdefault(place, (processors, []))
        with lowering_scope(there):
            weights += [named_weights(layer, theta[layer.params.name]) for layer in layers]
    found: dict[str, Tensor] = {}
    for path in next(iter(held.values()))[1][0]:
        slices = [
            (processors, [layer[path].slices for layer in weights])
            for processors, weights in held.values()
        ]
        found[prefix + path] = stacked_weight(lowering, slices, shapes[prefix + path])
    return found


def stacked_weight(
    lowering: PlacementLowering,
    held: Sequence[tuple[Sequence[int], Sequence[Slices]]],
    shape: Shape,
) -> Tensor:
    """A weight of alike layers, each where its layer is.

    Args:
        lowering: of the whole mesh.
        held: for each place along the axis `layers` numbers of processors there, and the weights of
            its layers: what these have of them.
        shape: of the weights of all layers, with the dims of the stack in front.
    """
    slices: dict[int, tf.Tensor] = {}
    sizes = lowering.tensor_layout(shape).slice_shape
    device = dict(zip(lowering.processors, lowering.devices, strict=True))
    for processors, layers in held:
        for i, processor in enumerate(processors):
            with tf.device(device[processor]):
                slices[processor] = tf.reshape(tf.stack([layer[i] for layer in layers]), sizes)
    return Tensor(lowering, tuple(slices[i] for i in sorted(slices)), shape)
