"""The layers of a sequence, one by one."""

from __future__ import annotations

from typing import Any

from lingvo.core import builder_layers

from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers.check_params import check_layer
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.function_layer import as_layer


def named_layers(params: Any) -> list[Any]:
    """Copies the params of all layers of a sequence and names them by position.

    In a list, plain functions are layers too.
    """
    if isinstance(params, (list, tuple)):
        params = [as_layer(p) for p in params]
        for number, p in enumerate(params):
            _check(p, f"layer {number} of what is to be cut")
        layers = [p.Copy() for p in params]
    else:
        layers = _flatten(params)
    for number, layer in enumerate(layers):
        layer.name = f"cell_{number:03d}"
    return layers


def _check(params: Any, where: str = "what is to be cut") -> None:
    try:
        check_layer(where, params)
    except PipelineError as error:
        raise PartitionError(str(error)) from error


def _flatten(params: Any) -> list[Any]:
    """Copies the params of all layers of a sequence, including those of nested sequences."""
    _check(params)
    if params.cls not in (builder_layers.SequentialLayer, FeatureExtractionLayer):
        return [params.Copy()]
    if params.cls is FeatureExtractionLayer and (params.num_act_outputs or params.num_act_inputs):
        raise PartitionError(
            f"{params.name!r} fetches or forwards activations between its stages; such a layer "
            "cannot be cut again: write the stages by hand"
        )
    # At least once, as in `SequentialLayer`.
    repeat = max(params.repeat, 1) if params.cls is builder_layers.SequentialLayer else 1
    return [layer for _ in range(repeat) for sub in params.sub for layer in _flatten(sub)]
