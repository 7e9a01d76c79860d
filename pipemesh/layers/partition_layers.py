"""Costs of lingvo layers, and the stages that they are cut into."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import builder_layers, py_utils, tshape

from pipemesh.backend.static_shape import num_bytes, static_sizes
from pipemesh.errors import PartitionError, PipelineError
from pipemesh.layers.check_params import check_layer, with_article
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.foreign_layers import as_layer
from pipemesh.layers.mesh_cluster import mesh_cluster
from pipemesh.layers.pipeline.alike_stages import like_earlier, shapes_text
from pipemesh.layers.pipeline.pipelining import PipeliningLayer
from pipemesh.lowering.costs import OperationCosts
from pipemesh.mesh import Mesh
from pipemesh.partition import LayerCost, Partition, partition, profile_costs
from pipemesh.partition.costs import number_problem
from pipemesh.partition.options import check_schedule
from pipemesh.recurrent.forecast import StageMemory
from pipemesh.text import did_you_mean


def named_layers(params: Any) -> list[Any]:
    """Copies the params of all layers, or functions, of a sequence and names them by position."""
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


_META = (
    "define it as a classmethod FPropMeta(cls, p, *shapes) that returns "
    "py_utils.NestedMap(flops=a number, out_shapes=a tuple of tshape.Shape)"
)


@dataclasses.dataclass(frozen=True)
class Meta:
    """The result of the `FPropMeta` of a layer."""

    flops: float  # of the forward pass
    out_shapes: tuple[Any, ...]  # a `tshape.Shape` or None for each output
    parameter_bytes: float | None = None
    activation_bytes: float | None = None  # kept for the backward pass
    communication: OperationCosts | None = None
    held_bytes: int = 0  # of weights, on one device of a replica
    fetched_bytes: int = 0  # of weights that a replica gets from others for a pass
    dims: Mapping[str, Collection[int]] = dataclasses.field(default_factory=dict[str, Any])
    weight_dims: Collection[str] = ()


def layer_flops(layers: list[Any], *shapes: Any) -> list[float]:
    """Returns the flops of each layer by its `FPropMeta`; see `layer_metas`."""
    return [meta.flops for meta in layer_metas(layers, *shapes)]


def layer_metas(layers: Sequence[Any], *shapes: Any, like: Sequence[int] = ()) -> list[Meta]:
    """Returns the `FPropMeta` of each layer, given the shapes of the first inputs. With `like`, of
    `like_earlier`, layers that are like an earlier one of the same inputs have its own.
    """
    for number, shape in enumerate(shapes):
        if not isinstance(shape, (tshape.Shape, tf.TensorSpec, py_utils.NestedMap, type(None))):
            raise PartitionError(
                f"the shape of input {number} is {shape!r}, {with_article(type(shape).__name__)}; "
                "write lingvo.core.tshape.Shape([...]), one for each input of the first layer, or "
                "None for an input that is None"
            )
    metas: list[Meta] = []
    known: dict[tuple[int, str], Meta] = {}
    input_shapes: tuple[Any, ...] = tuple(map(_as_shape, shapes))
    for layer, same in zip(layers, like or range(len(layers)), strict=True):
        key = same, shapes_text(input_shapes)
        if key not in known:
            known[key] = _meta(layer, input_shapes)
        metas.append(known[key])
        input_shapes = metas[-1].out_shapes
    return metas


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
    said = {name: getattr(meta, name, None) for name in ("parameter_bytes", "activation_bytes")}
    for name, value in said.items():
        if value is not None and number_problem(value):
            raise PartitionError(
                f"{where}: FPropMeta returns {name}={value!r}; it must be a number of bytes, zero "
                "or more"
            )
    others = ("communication", "held_bytes", "fetched_bytes", "dims", "weight_dims")
    more = {name: getattr(meta, name) for name in others if getattr(meta, name, None) is not None}
    more.setdefault("held_bytes", int(said["parameter_bytes"] or 0))
    return Meta(flops, tuple(out_shapes), **said, **more)


def layer_costs(
    params: Any, *shapes: Any, fprop_dtype: Any = None, measured: bool = False
) -> list[LayerCost]:
    """Returns the time and the bytes of each layer of a sequence, for one microbatch.

    Times are the flops of `FPropMeta`, or measured seconds. Bytes are those of
    `PipeliningLayer.PredictMemory` for each layer as a separate stage, traced in a temporary graph.

    If `FPropMeta` returns `parameter_bytes` or `activation_bytes`, these are used. If all layers
    return both, nothing is traced, and all outputs count as floating.

    Args:
        params: params of a `SequentialLayer`, or a list of layers' params.
        *shapes: one for each input of the first layer, for one microbatch: a `tshape.Shape` if the
            input is floating, otherwise a `tf.TensorSpec`; a NestedMap of these; or None.
        fprop_dtype: the dtype that the stages compute in.
        measured: whether to run each layer, forward and backward, on this machine; see
            `pipemesh.partition.profile_costs`. The weights then take memory, one layer at a time.

    Returns:
        One cost for each layer, named as in `PartitionSequentialLayers`.

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
    if not measured and not any(
        None in (meta.parameter_bytes, meta.activation_bytes) for meta in metas
    ):
        return [
            LayerCost(
                meta.flops,
                parameter_bytes=meta.parameter_bytes or 0,
                activation_bytes=meta.activation_bytes or 0,
                boundary_bytes=output_bytes(meta, fprop_dtype),
                name=layer.name,
            )
            for layer, meta in zip(layers, metas, strict=True)
        ]
    specs: tuple[Any, ...] = tuple(_spec(shape, fprop_dtype) for shape in shapes)
    seen: dict[Any, _Traced] = {}
    costs: list[LayerCost] = []
    before: StageMemory | None = None
    for layer, meta, same in zip(layers, metas, like_earlier(layers), strict=True):
        is_head = layer is layers[-1] and _returns_scalar(meta)
        # `differences` leaves out what a layer fetches.
        fetched = str(getattr(layer, "act_fetch_layers", None))
        key = same, shapes_text(specs), is_head, fetched
        if key not in seen:
            seen[key] = _trace(layer, specs, is_head, fprop_dtype, measured)
        held, weight_bytes, seconds = seen[key]
        # Tensors that both this layer and the previous one keep.
        outputs = before.kept_outputs if before else ()
        shared = sum(b for b, too in zip(held.kept_inputs, outputs, strict=False) if too)
        kept, own = meta.activation_bytes, meta.parameter_bytes
        costs.append(
            LayerCost(
                forward=meta.flops if seconds is None else seconds[0],
                backward=None if seconds is None else seconds[1],
                parameter_bytes=weight_bytes if own is None else own,
                activation_bytes=held.kept if kept is None else kept,
                boundary_bytes=num_bytes(held.outputs),
                shared_bytes=shared if kept is None else 0,
                name=layer.name,
            )
        )
        specs = _packed(layer, meta.out_shapes, held.outputs)
        before = None if kept is not None else held
    return costs


# The memory of a stage, the bytes of its weights, and its seconds forward and backward.
_Traced = tuple[StageMemory, int, tuple[float, float] | None]


def _computing_in(layer: Any, fprop_dtype: Any) -> Any:
    """Returns the params as they are in a stage that computes in a dtype."""
    if fprop_dtype is None or layer.fprop_dtype is not None:
        return layer
    return layer.Copy().Set(fprop_dtype=fprop_dtype)


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


def output_bytes(meta: Meta, dtype: Any) -> int:
    """Returns the bytes of a layer's outputs, which all count as floating."""
    specs = tf.nest.flatten([_spec(shape, dtype) for shape in meta.out_shapes])
    return num_bytes(spec for spec in specs if spec is not None)


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
def _alone(eagerly: bool) -> Iterator[None]:
    """Enters a cluster of one device and sets lingvo's mode for a while."""
    was_eager = py_utils.IsEagerMode()
    py_utils.SetEagerMode(eagerly, test_mode=True)
    try:
        with mesh_cluster(Mesh.from_text("layers:1")):
            yield
    finally:
        py_utils.SetEagerMode(was_eager, test_mode=True)


def _trace(layer: Any, specs: Any, is_head: bool, fprop_dtype: Any, measured: bool) -> _Traced:
    """Traces a layer as a stage, and runs it if asked to."""
    stage = FeatureExtractionLayer.Params().Set(name="stage", sub=[layer.Copy()])
    try:
        with tf.Graph().as_default(), _alone(eagerly=False):
            py_utils.GetOrCreateGlobalStepVar()
            params = PipeliningLayer.Params().Set(
                name="costs",
                cell_tpl=[stage],
                remat="none",
                loss_inside=is_head,
                check_numerics="off",
                fprop_dtype=fprop_dtype,
            )
            pipeline = params.Instantiate()
            [device] = pipeline.PredictMemory(*specs)
            [memory] = device.stages
            weight_bytes = num_bytes(pipeline.stage.vars.Flatten())
        return memory, weight_bytes, _measure(stage, specs, fprop_dtype) if measured else None
    except Exception as error:
        leaves = [leaf for leaf in tf.nest.flatten(specs) if leaf is not None]
        texts = ", ".join(f"{leaf.dtype.name} {leaf.shape.as_list()}" for leaf in leaves)
        raise PartitionError(
            f"{described(layer)} was traced to count its bytes, given {texts or 'nothing'}, which "
            f"failed with {type(error).__name__}: {error}; an input that is not floating must be "
            "given as tf.TensorSpec(shape, dtype)"
        ) from error


def _measure(stage: Any, specs: Any, fprop_dtype: Any) -> tuple[float, float]:
    """Runs a stage on examples and returns its seconds forward and backward."""
    if not tf.executing_eagerly():
        raise PartitionError(
            "measured=True runs layers eagerly; call it outside of any graph, where TensorFlow "
            "executes eagerly"
        )
    with _alone(eagerly=True), py_utils.VariableStore():
        py_utils.GetOrCreateGlobalStepVar()
        if fprop_dtype is not None:
            stage.Set(fprop_dtype=fprop_dtype)
        [cost] = profile_costs([stage.Instantiate()], tuple(map(_example, specs)))
    return cost.forward, cost.backward_or_default


def _example(spec: tf.TensorSpec | None) -> tf.Tensor | None:
    """Returns an example input; integers are zeros, which are valid indices everywhere."""
    if spec is None:
        return None
    if spec.dtype.is_floating:
        return tf.cast(tf.random.stateless_normal(static_sizes(spec), seed=(1, 2)), spec.dtype)
    return tf.zeros(spec.shape, spec.dtype)


_OPTIONS = [
    name
    for name, parameter in inspect.signature(partition).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
]


def PartitionSequentialLayers(
    params: Any,
    num_partitions: int,
    *shapes: Any,
    measured: bool = False,
    fprop_dtype: Any = None,
    **options: Any,
) -> list[Any]:
    """Cuts sequential layers into stages whose largest cost is as small as possible.

    A `SequentialLayer` is flattened first, including nested layers and repetitions. In a list every
    layer is a unit that is not cut, even a `SequentialLayer`. lingvo does the same, so weights have
    lingvo's names. Layers and their variables are named `cell_000`, `cell_001`, ... in order, for
    any number of stages.

    Args:
        params: params of a `SequentialLayer`, or a list of layers' params and plain functions.
        num_partitions: the number of stages.
        *shapes: a `tshape.Shape` for each input of the first layer, or None for an input that is
            None. With `memory_limit` or `bandwidth` they must be the shapes of one microbatch, and
            inputs that are not floating need a `tf.TensorSpec`.
        measured: whether costs are seconds, measured by running each layer on this machine, instead
            of flops.
        fprop_dtype: the dtype that the stages compute in; it affects bytes and measured times.
        **options: options of `pipemesh.partition.partition`. Bytes are counted (see `layer_costs`)
            only if an option needs them. `bandwidth` is in bytes per second if costs are measured,
            else per flop.

    Returns:
        Params of one `FeatureExtractionLayer` for each stage.

    Raises:
        PartitionError: `params` are not params of layers, or there are fewer layers than stages. A
            shape has another type. A layer's `FPropMeta` is missing, fails or returns no cost. An
            option is unknown or invalid, or no cut satisfies the options.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> stages = PartitionSequentialLayers([dense] * 4, 2, tshape.Shape([8, 4]))
        >>> [[layer.name for layer in stage.sub] for stage in stages]
        [['cell_000', 'cell_001'], ['cell_002', 'cell_003']]
    """
    for name in options:
        if name not in _OPTIONS:
            hint = did_you_mean(name, _OPTIONS)
            raise PartitionError(
                f"{name!r} is no option; {hint}there are {', '.join([*_OPTIONS, 'measured'])}"
            )
    layers = named_layers(params)
    if options.get("schedule") is not None:
        # Before layers are measured.
        check_schedule(num_partitions, {name: options.get(name) for name in _OPTIONS})
    costs: list[float] | list[LayerCost]
    if measured or any(options.get(name) is not None for name in ("memory_limit", "bandwidth")):
        costs = layer_costs(layers, *shapes, measured=measured, fprop_dtype=fprop_dtype)
    else:
        costs = layer_flops(layers, *shapes)
        if options.get("remat", "none") != "none":
            costs = [LayerCost(flops) for flops in costs]
    try:
        plan = partition(costs, num_partitions, **options)
    except PartitionError as error:
        if not any(layer.cls is builder_layers.SequentialLayer for layer in layers):
            raise
        raise PartitionError(
            f"{error}. A SequentialLayer in a list is one layer: to have it cut, give a "
            "SequentialLayer of them all"
        ) from error
    return stage_params(layers, plan)


def stage_params(layers: list[Any], plan: Partition) -> list[Any]:
    """Returns params of one `FeatureExtractionLayer` for each stage of a partition."""
    return [
        FeatureExtractionLayer.Params().Set(name=f"d{number}", sub=[layers[i] for i in stage])
        for number, stage in enumerate(plan.stages)
    ]
