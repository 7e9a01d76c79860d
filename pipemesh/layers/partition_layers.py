"""A cut of a stack of layer params into stages of equal cost."""

from __future__ import annotations

import inspect
from typing import Any

from lingvo.core import builder_layers

from pipemesh.errors import PartitionError
from pipemesh.layers.costs import layer_costs
from pipemesh.layers.feature_extraction import FeatureExtractionLayer
from pipemesh.layers.layer_list import named_layers
from pipemesh.layers.meta import layer_flops
from pipemesh.partition import LayerCost, Partition, partition
from pipemesh.partition.memory import SCHEDULES
from pipemesh.schedule import Schedule, ScheduleSpec, simulate
from pipemesh.schedule.names import parse
from pipemesh.text import did_you_mean

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
        fprop_dtype: the dtype that the stages compute in, as in the params of the
            `PipeliningLayer`; it affects bytes and measured times.
        **options: options of `pipemesh.partition.partition`: `memory_limit`, `bandwidth`, `speeds`,
            `remat`, `num_microbatches`, `num_virtual_stages`, `same_stage`, `fixed` and so on.
            `schedule` may be any name, `file:x.csv`, or a `Schedule`. Bytes are counted (see
            `layer_costs`) only if an option needs them. `bandwidth` is in bytes per unit of cost:
            per second if costs are measured, else per flop.

    Returns:
        Params of one `FeatureExtractionLayer` for each stage.

    Raises:
        PartitionError: `params` are not params of layers, or there are fewer layers than stages. A
            shape has another type. A layer's `FPropMeta` is missing, fails or returns no cost. An
            option is unknown or invalid, or no cut satisfies the options.
        ScheduleError: the schedule does not support the number of stages and microbatches.

    Example:
        >>> from lingvo.core import layers, tshape
        >>> dense = layers.FCLayer.Params().Set(input_dim=4, output_dim=4)
        >>> stages = PartitionSequentialLayers(
        ...     [dense.Copy() for _ in range(4)], 2, tshape.Shape([8, 4]))
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
    options |= _schedule(options.pop("schedule", None), num_partitions, options)
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


def _schedule(schedule: Any, num_stages: int, options: dict[str, Any]) -> dict[str, Any]:
    """Returns the options that the partitioner needs for a schedule: its name if that is enough."""
    if schedule is None:
        return {}
    if not isinstance(schedule, Schedule):
        if parse(schedule).name in SCHEDULES:
            return {"schedule": schedule}
        if options.get("num_microbatches") is None:
            raise PartitionError(
                f"schedule {schedule!r} is simulated to count what its stages hold; give "
                "num_microbatches"
            )
        spec = ScheduleSpec.from_text(schedule)
        schedule = spec.for_stages(num_stages, options["num_microbatches"])
    if schedule.num_stages != num_stages:
        raise PartitionError(
            f"the schedule has {schedule.num_stages} stages, but num_partitions is {num_stages}; "
            "make them equal"
        )
    facts = simulate(schedule).for_partition()
    number = options.get("num_microbatches")
    if number not in (None, schedule.num_microbatches):
        raise PartitionError(
            f"the schedule has {schedule.num_microbatches} microbatches, but num_microbatches is "
            f"{number}; leave it out"
        )
    return facts


def stage_params(layers: list[Any], plan: Partition) -> list[Any]:
    """Returns params of one `FeatureExtractionLayer` for each stage of a partition."""
    return [
        FeatureExtractionLayer.Params().Set(name=f"d{number}", sub=[layers[i] for i in stage])
        for number, stage in enumerate(plan.stages)
    ]
