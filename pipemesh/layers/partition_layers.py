"""Cuts a stack of layer params into stages of equal flops."""

from __future__ import annotations

from typing import Any

from lingvo.core import builder_layers, py_utils, tshape

from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers.check_params import check_layer, with_article
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.partition import Partition, partition

_META = (
    "define it as a classmethod FPropMeta(cls, p, *shapes) that returns "
    "py_utils.NestedMap(flops=a number, out_shapes=a tuple of tshape.Shape)"
)


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
        PartitionError: `params` are not the params of layers, there are fewer layers than stages, a
            shape is none, or a layer's `FPropMeta` is missing, fails or says no cost.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> stages = PartitionSequentialLayers(
        ...     [dense.Copy() for _ in range(4)], 2, tshape.Shape([8, 4]))
        >>> [[layer.name for layer in stage.sub] for stage in stages]
        [['cell_000', 'cell_001'], ['cell_002', 'cell_003']]
    """
    layers = named_layers(params)
    flops = layer_flops(layers, *shapes)
    try:
        plan = partition(flops, num_partitions)
    except PartitionError as error:
        if not any(layer.cls is builder_layers.SequentialLayer for layer in layers):
            raise
        raise PartitionError(
            f"{error}. A SequentialLayer in a list is one layer: to have it cut, give a "
            "SequentialLayer of them all"
        ) from error
    return stage_params(layers, plan)


def named_layers(params: Any) -> list[Any]:
    """Copies of the params of all layers of a sequence, named by their place in it."""
    if isinstance(params, (list, tuple)):
        for p in params:
            _check(p)
        layers = [p.Copy() for p in params]
    else:
        layers = _flatten(params)
    for number, layer in enumerate(layers):
        layer.name = f"cell_{number:03d}"
    return layers


def _check(params: Any) -> None:
    try:
        check_layer("what is to be cut", params)
    except PipelineError as error:
        raise PartitionError(str(error)) from error


def _flatten(params: Any) -> list[Any]:
    """Copies of the params of all layers of a sequence, nested sequences taken apart."""
    _check(params)
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
    """The flops of each layer by its `FPropMeta`, given the shapes of the first one's inputs.

    Raises:
        PartitionError: a shape is none, or a layer's `FPropMeta` is missing, fails or says no cost.
    """
    for number, shape in enumerate(shapes):
        if not isinstance(shape, (tshape.Shape, py_utils.NestedMap, type(None))):
            raise PartitionError(
                f"the shape of input {number} is {shape!r}, {with_article(type(shape).__name__)}; "
                "write "
                "lingvo.core.tshape.Shape([...]), one for each input of the first layer, or None "
                "for an input that is None"
            )
    flops = []
    for layer in layers:
        cost, shapes = _cost(layer, shapes)
        flops.append(cost)
    return flops


def _cost(layer: Any, shapes: tuple[Any, ...]) -> tuple[float, tuple[Any, ...]]:
    """Flops and output shapes of one layer."""
    where = f"layer {layer.name!r} ({layer.cls.__name__})"
    given = ", ".join(map(str, shapes)) or "no shapes"
    try:
        meta = layer.cls.FPropMeta(layer, *shapes)
    except NotImplementedError as error:
        raise PartitionError(
            f"{where} has no FPropMeta, which says what it costs; {_META}, or cut the stack by "
            "hand into a list of FeatureExtractionLayers"
        ) from error
    except Exception as error:
        raise PartitionError(
            f"{where}: FPropMeta, given {given}, failed with {type(error).__name__}: {error}; do "
            "the shapes fit the inputs of the layer?"
        ) from error
    try:
        flops, out_shapes = float(meta.flops), meta.out_shapes
    except (AttributeError, TypeError, ValueError) as error:
        raise PartitionError(f"{where}: FPropMeta returns {meta!r}; {_META}") from error
    if isinstance(out_shapes, tshape.Shape) or not isinstance(out_shapes, (list, tuple)):
        raise PartitionError(f"{where}: FPropMeta returns out_shapes {out_shapes!r}; {_META}")
    return flops, tuple(out_shapes)


def stage_params(layers: list[Any], plan: Partition) -> list[Any]:
    """Params of one `FeatureExtractionLayer` for each stage of a partition."""
    return [
        FeatureExtractionLayer.Params().Set(name=f"d{number}", sub=[layers[i] for i in stage])
        for number, stage in enumerate(plan.stages)
    ]
