"""The results of `FPropMeta`: costs that layers state themselves."""

from __future__ import annotations

import dataclasses
import traceback
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.errors import PartitionError
from pipemesh.layers.check_params import with_article
from pipemesh.lowering.lowering import CommunicationCosts
from pipemesh.partition.costs import number_problem

_META = (
    "define it as a classmethod FPropMeta(cls, p, *shapes) that returns "
    "py_utils.NestedMap(flops=a number, out_shapes=a tuple of tshape.Shape)"
)


@dataclasses.dataclass(frozen=True)
class Meta:
    """The result of the `FPropMeta` of a layer.

    Attributes:
        flops: flops of the forward pass.
        out_shapes: a `tshape.Shape`, or None, for each output.
        parameter_bytes: bytes of all weights, or None if not stated.
        activation_bytes: bytes that the layer keeps for its backward pass, or None.
        communication_bytes: bytes that its processors send, forward and backward, or None.
        communication: traffic of one of its processors, by axis and primitive, or None.
    """

    flops: float
    out_shapes: tuple[Any, ...]
    parameter_bytes: float | None = None
    activation_bytes: float | None = None
    communication_bytes: float | None = None
    communication: CommunicationCosts | None = dataclasses.field(default=None, kw_only=True)

    @classmethod
    def bytes_said(cls) -> tuple[str, ...]:
        """Returns the names of the optional byte counts."""
        fields = dataclasses.fields(cls)
        return tuple(f.name for f in fields if f.default is None and not f.kw_only)


def layer_flops(layers: list[Any], *shapes: Any) -> list[float]:
    """Returns the flops of each layer by its `FPropMeta`; see `layer_metas`."""
    return [meta.flops for meta in layer_metas(layers, *shapes)]


def layer_metas(layers: list[Any], *shapes: Any) -> list[Meta]:
    """Returns the `FPropMeta` of each layer, given the shapes of the first one's inputs.

    A shape is a `tshape.Shape`, a `tf.TensorSpec`, a NestedMap of these, or None.

    Raises:
        PartitionError: a shape has another type, or `FPropMeta` is missing, fails or returns no
            cost.
    """
    for number, shape in enumerate(shapes):
        if not isinstance(shape, (tshape.Shape, tf.TensorSpec, py_utils.NestedMap, type(None))):
            raise PartitionError(
                f"the shape of input {number} is {shape!r}, {with_article(type(shape).__name__)}; "
                "write "
                "lingvo.core.tshape.Shape([...]), one for each input of the first layer, or None "
                "for an input that is None"
            )
    found = []
    given: tuple[Any, ...] = tuple(map(_as_shape, shapes))
    for layer in layers:
        found.append(_meta(layer, given))
        given = found[-1].out_shapes
    return found


def described(layer: Any) -> str:
    """Returns a layer's name and class, for errors."""
    return f"layer {layer.name!r} ({layer.cls.__name__})"


def _as_shape(value: Any) -> Any:
    if isinstance(value, py_utils.NestedMap):
        return value.Transform(_as_shape)
    return tshape.Shape(value.shape.as_list()) if isinstance(value, tf.TensorSpec) else value


def _meta(layer: Any, shapes: tuple[Any, ...]) -> Meta:
    where = described(layer)
    given = ", ".join(map(str, shapes)) or "no shapes"
    try:
        meta = layer.cls.FPropMeta(layer, *shapes)
    except NotImplementedError as error:
        raise PartitionError(
            f"{where} has no FPropMeta, which says what it costs; {_META}, or cut the stack by "
            "hand into a list of FeatureExtractionLayers"
        ) from error
    except Exception as error:
        # An assertion may have no message: then its line of code says more.
        what = str(error) or traceback.extract_tb(error.__traceback__)[-1].line
        way_out = (
            "do the shapes fit the inputs of the layer?"
            if shapes
            else "give a tshape.Shape for each input of the first layer"
        )
        raise PartitionError(
            f"{where}: FPropMeta, given {given}, failed with {type(error).__name__}: {what}; "
            f"{way_out}"
        ) from error
    try:
        flops, out_shapes = float(meta.flops), meta.out_shapes
    except (AttributeError, TypeError, ValueError) as error:
        raise PartitionError(f"{where}: FPropMeta returns {meta!r}; {_META}") from error
    if isinstance(out_shapes, tshape.Shape) or not isinstance(out_shapes, (list, tuple)):
        raise PartitionError(f"{where}: FPropMeta returns out_shapes {out_shapes!r}; {_META}")
    said = {name: getattr(meta, name, None) for name in Meta.bytes_said()}
    for name, value in said.items():
        if value is not None and number_problem(value):
            raise PartitionError(
                f"{where}: FPropMeta returns {name}={value!r}; it must be a number of bytes, zero "
                "or more"
            )
    sent = getattr(meta, "communication", None)
    return Meta(flops, tuple(out_shapes), **said, communication=sent)
