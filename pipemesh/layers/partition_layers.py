"""Cuts a stack of layer params into stages of equal flops."""

from __future__ import annotations

from typing import Any

from lingvo.core import builder_layers

from pipemesh.errors import PartitionError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.partition import Partition, partition


def PartitionSequentialLayers(params: Any, num_partitions: int, *shapes: Any) -> list[Any]:
    """Cuts sequential layers into stages whose largest cost in flops is as small as possible.

    A `SequentialLayer` is flattened first, with all in it and its repetitions. In a list every
    layer is one that is not cut, be it a `SequentialLayer`: so it is in lingvo, and so weights have
    lingvo's names. The layers are named `cell_000`, `cell_001`, ... in order, whatever the number
    of stages, and so are their variables.

    Args:
        params: params of a `SequentialLayer`, or a list of layers' params.
        num_partitions: the number of stages.
        *shapes: `tshape.Shape` of each input of the first layer; None for an input that is None.

    Returns:
        Params of one `FeatureExtractionLayer` a stage.

    Raises:
        PartitionError: there are fewer layers than stages, or a layer's `FPropMeta` does not say
            a cost.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> stages = PartitionSequentialLayers(
        ...     [dense.Copy() for _ in range(4)], 2, tshape.Shape([8, 4]))
        >>> [[layer.name for layer in stage.sub] for stage in stages]
        [['cell_000', 'cell_001'], ['cell_002', 'cell_003']]
    """
    layers = named_layers(params)
    if num_partitions > len(layers):
        raise PartitionError(
            f"{len(layers)} layers cannot be cut into {num_partitions} stages; give more layers or "
            "ask for fewer stages. A SequentialLayer in a list is one layer: to have it cut, give "
            "a SequentialLayer of them all"
        )
    plan = partition(layer_flops(layers, *shapes), num_partitions)
    return stage_params(layers, plan)


def named_layers(params: Any) -> list[Any]:
    """Copies of the params of all layers of a sequence, named by their place in it."""
    layers = [p.Copy() for p in params] if isinstance(params, (list, tuple)) else _flatten(params)
    for number, layer in enumerate(layers):
        layer.name = f"cell_{number:03d}"
    return layers


def _flatten(params: Any) -> list[Any]:
    """Copies of the params of all layers of a sequence, nested sequences taken apart."""
    if params.cls not in (builder_layers.SequentialLayer, FeatureExtractionLayer):
        return [params.Copy()]
    if params.cls is FeatureExtractionLayer and (params.num_act_outputs or params.num_act_inputs):
        raise PartitionError(
            f"{params.name!r} fetches or forwards activations between its stages; such a layer "
            "cannot be cut again: write the stages by hand"
        )
    # As the layer itself has it: once at least.
    repeat = max(params.repeat, 1) if params.cls is builder_layers.SequentialLayer else 1
    return [layer for _ in range(repeat) for sub in params.sub for layer in _flatten(sub)]


def layer_flops(layers: list[Any], *shapes: Any) -> list[float]:
    """The flops of each layer by its `FPropMeta`, given the shapes of the first one's inputs."""
    flops = []
    for layer in layers:
        meta = layer.cls.FPropMeta(layer, *shapes)
        flops.append(float(meta.flops))
        shapes = tuple(meta.out_shapes)
    return flops


def stage_params(layers: list[Any], plan: Partition) -> list[Any]:
    """Params of one `FeatureExtractionLayer` for each stage of a partition."""
    return [
        FeatureExtractionLayer.Params().Set(name=f"d{number}", sub=[layers[i] for i in stage])
        for number, stage in enumerate(plan.stages)
    ]
