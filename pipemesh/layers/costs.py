"""Costs of lingvo layers: from their params to the partitioner's `LayerCost`s."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils, tshape

from pipemesh.backend.static_shape import num_bytes, static_sizes
from pipemesh.errors import PartitionError
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.layer_list import named_layers
from pipemesh.layers.mesh_cluster import mesh_cluster
from pipemesh.layers.meta import Meta, described, layer_metas
from pipemesh.layers.pipeline.pipelining import PipeliningLayer
from pipemesh.mesh import Mesh
from pipemesh.partition import LayerCost, profile_costs
from pipemesh.recurrent.forecast import StageMemory


def layer_costs(
    params: Any, *shapes: Any, fprop_dtype: Any = None, measured: bool = False
) -> list[LayerCost]:
    """Returns the time and the bytes of each layer of a sequence, for one microbatch.

    Times are the flops of `FPropMeta`, or measured seconds. Bytes are counted as in
    `PipeliningLayer.PredictMemory`. Each layer is traced with its gradient as a separate stage, in
    a temporary graph. Nothing is computed, and no weight takes memory. Alike layers are traced
    once.

    If `FPropMeta` returns `parameter_bytes` or `activation_bytes`, these are used. If all layers
    return both, nothing is traced, and all outputs count as floating.

    Args:
        params: params of a `SequentialLayer`, or a list of layers' params.
        *shapes: one for each input of the first layer, for one microbatch: a `tshape.Shape` if the
            input is floating, otherwise a `tf.TensorSpec`; a NestedMap of these; or None.
        fprop_dtype: the dtype that the stages compute in, as in the params of the
            `PipeliningLayer`.
        measured: whether to run each layer, forward and backward, on this machine; see
            `pipemesh.partition.profile_costs`. The weights then take memory, one layer at a time.

    Returns:
        One cost for each layer, named `cell_000`, `cell_001`, ... as in
        `PartitionSequentialLayers`.

    Raises:
        PartitionError: a layer cannot be traced or run, or an error of `PartitionSequentialLayers`.

    Example:
        >>> from lingvo.core import layers
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> [cost] = layer_costs([dense], tf.TensorSpec([8, 4]))
        >>> cost.parameter_bytes, cost.boundary_bytes
        (80, 128)
    """
    layers = named_layers(params)
    metas = layer_metas([_computing_in(layer, fprop_dtype) for layer in layers], *shapes)
    if not measured and all(map(_says_all, metas)):
        return [
            LayerCost(
                meta.flops,
                parameter_bytes=meta.parameter_bytes or 0,
                activation_bytes=meta.activation_bytes or 0,
                boundary_bytes=num_bytes(_leaves(meta.out_shapes, fprop_dtype)),
                name=layer.name,
            )
            for layer, meta in zip(layers, metas, strict=True)
        ]
    given: tuple[Any, ...] = tuple(_spec(shape, fprop_dtype) for shape in shapes)
    seen: dict[Any, _Traced] = {}
    costs: list[LayerCost] = []
    before: StageMemory | None = None
    for layer, meta in zip(layers, metas, strict=True):
        is_head = layer is layers[-1] and _returns_scalar(meta)
        alike = layer.Copy().Set(name="layer").ToText()
        key = (alike, str(tf.nest.map_structure(str, given)), is_head)
        if key not in seen:
            with _named(layer, given, "traced"):
                seen[key] = _trace(layer, given, is_head, fprop_dtype)
                if measured:
                    seen[key].seconds = _measure(layer, given, fprop_dtype)
        found = seen[key]
        held = found.memory
        # Tensors that both this layer and the previous one keep.
        outputs = before.kept_outputs if before else ()
        shared = sum(b for b, too in zip(held.kept_inputs, outputs, strict=False) if too)
        kept, own = meta.activation_bytes, meta.parameter_bytes
        costs.append(
            LayerCost(
                forward=meta.flops if found.seconds is None else found.seconds[0],
                backward=None if found.seconds is None else found.seconds[1],
                parameter_bytes=found.parameter_bytes if own is None else own,
                activation_bytes=held.kept if kept is None else kept,
                boundary_bytes=num_bytes(held.outputs),
                shared_bytes=shared if kept is None else 0,
                name=layer.name,
            )
        )
        given = _packed(layer, meta.out_shapes, held.outputs)
        before = None if kept is not None else held
    return costs


@dataclasses.dataclass
class _Traced:
    memory: StageMemory
    parameter_bytes: int
    seconds: tuple[float, float] | None = None


def _computing_in(layer: Any, fprop_dtype: Any) -> Any:
    """Returns the params as they are in a stage that computes in a dtype."""
    if fprop_dtype is None or layer.fprop_dtype is not None:
        return layer
    return layer.Copy().Set(fprop_dtype=fprop_dtype)


def _says_all(meta: Meta) -> bool:
    return meta.parameter_bytes is not None and meta.activation_bytes is not None


def _returns_scalar(meta: Meta) -> bool:
    """Returns whether a layer is the head of a pipeline with the loss inside."""
    first = meta.out_shapes[0] if meta.out_shapes else None
    return isinstance(first, tshape.Shape) and not first.ToTensorShape().as_list()


def _spec(value: Any, dtype: Any) -> Any:
    """Converts shapes to specs; shapes without a dtype become floating."""
    if isinstance(value, py_utils.NestedMap):
        return value.Transform(lambda leaf: _spec(leaf, dtype))
    if not isinstance(value, tshape.Shape):
        return value
    return tf.TensorSpec(value.ToTensorShape(), dtype or tf.float32)


def _leaves(shapes: Any, dtype: Any) -> list[tf.TensorSpec]:
    specs = tf.nest.flatten([_spec(shape, dtype) for shape in shapes])
    return [spec for spec in specs if spec is not None]


def _packed(layer: Any, shapes: tuple[Any, ...], outputs: tuple[tf.TensorSpec, ...]) -> Any:
    """Nests the specs of a layer's outputs as its `FPropMeta` does."""
    nested = tuple(_spec(shape, None) for shape in shapes)
    expected = sum(leaf is not None for leaf in tf.nest.flatten(nested))
    if expected != len(outputs):
        raise PartitionError(
            f"{described(layer)}: FPropMeta says that it returns {expected} tensors, but it "
            f"returns {len(outputs)}; out_shapes must have one shape a tensor, and None for None"
        )
    specs = iter(outputs)
    flat = [None if leaf is None else next(specs) for leaf in tf.nest.flatten(nested)]
    return tf.nest.pack_sequence_as(nested, flat)


@contextlib.contextmanager
def _named(layer: Any, given: Any, what: str) -> Iterator[None]:
    """Adds the layer and its inputs to an error."""
    try:
        yield
    except Exception as error:
        specs = [leaf for leaf in tf.nest.flatten(given) if leaf is not None]
        texts = ", ".join(f"{spec.dtype.name} {spec.shape.as_list()}" for spec in specs)
        raise PartitionError(
            f"{described(layer)} was {what} to count its bytes, given {texts or 'nothing'}, which "
            f"failed with {type(error).__name__}: {error}; an input that is not floating must be "
            "given as tf.TensorSpec(shape, dtype)"
        ) from error


def _stage(layer: Any) -> Any:
    return FeatureExtractionLayer.Params().Set(name="stage", sub=[layer.Copy()])


@contextlib.contextmanager
def _alone(eagerly: bool) -> Iterator[None]:
    """Enters a cluster of one device and sets lingvo's mode for a while."""
    was_eager = py_utils.IsEagerMode()
    py_utils.SetEagerMode(eagerly, test_mode=True)
    try:
        with mesh_cluster(Mesh.from_text("layers:1")):
            yield
    finally:
        py_utils.SetEagerMode(was_eager, test_mode=True)


def _trace(layer: Any, given: Any, is_head: bool, fprop_dtype: Any) -> _Traced:
    with tf.Graph().as_default(), _alone(eagerly=False):
        py_utils.GetOrCreateGlobalStepVar()
        params = PipeliningLayer.Params().Set(
            name="costs",
            cell_tpl=[_stage(layer)],
            remat="none",
            loss_inside=is_head,
            check_numerics="off",
            fprop_dtype=fprop_dtype,
        )
        pipeline = params.Instantiate()
        [device] = pipeline.PredictMemory(*given)
        [memory] = device.stages
        weights = pipeline.stage.vars.Flatten()
        return _Traced(memory, num_bytes(weights))


def _measure(layer: Any, given: Any, fprop_dtype: Any) -> tuple[float, float]:
    if not tf.executing_eagerly():
        raise PartitionError(
            "measured=True runs layers eagerly; call it outside of any graph, where TensorFlow "
            "executes eagerly"
        )
    with _alone(eagerly=True), py_utils.VariableStore():
        py_utils.GetOrCreateGlobalStepVar()
        params = _stage(layer)
        if fprop_dtype is not None:
            params.Set(fprop_dtype=fprop_dtype)
        [cost] = profile_costs([params.Instantiate()], tuple(map(_example, given)))
    return cost.forward, cost.backward_or_default


def _example(spec: tf.TensorSpec | None) -> tf.Tensor | None:
    """Returns an example input; integers are zeros, which are valid indices everywhere."""
    if spec is None:
        return None
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(static_sizes(spec), seed=(1, 2)), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)
