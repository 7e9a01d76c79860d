"""Values that stages sum or average over microbatches, such as the moments of batch norm.

lingvo's `BatchNormLayer` updates its moving averages in `FProp`: in a stage once a microbatch, and
again in recomputation. Here each stage merges the moments of its microbatches in its carry. After
the pipeline, lingvo's own update is called once, with the moments of the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import bn_layers, py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.feature_extraction import all_layers
from pipemesh.layers.named.norm_and_dropout import merged_moments

# The tensors of a layer's moments; see `merged_moments`.
_COUNT = 3


def _norms(stage: Any) -> list[Any]:
    """Returns the layers that average batches in variables; none in evaluation."""
    if stage.do_eval:
        return []
    return [layer for layer in all_layers(stage) if isinstance(layer, bn_layers.BatchNormLayer)]


def first_carry(stage: Any) -> list[tf.Tensor]:
    """Returns the values of accumulators before a step, and the moments of no rows."""
    sizes = [size for norm in _norms(stage) for size in (1, norm.params.dim, norm.params.dim)]
    return [*stage.GetAccumulatorValues().Flatten(), *(tf.zeros([size]) for size in sizes)]


@contextlib.contextmanager
def carried(stage: Any, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
    """Makes a stage compute with a carry; yields a function that returns the microbatch's carry.

    Afterwards accumulators have their earlier state, even if it was empty, because values set
    inside belong to the stage's graph. Restoring the result of `GetValue` would not work: for an
    accumulator that was reset it makes a tensor in the current graph.
    """
    kept = [(accumulator, dict(vars(accumulator))) for accumulator in stage.accumulators.Flatten()]
    count = len(kept)
    moments = list(carry[count:])
    try:
        with _merging(_norms(stage), moments):
            stage.SetAccumulatorValues(stage.accumulators.Pack(carry[:count]))
            yield lambda: [
                tf.convert_to_tensor(value)
                for value in (*stage.GetAccumulatorValues().Flatten(), *moments)
            ]
    finally:
        for accumulator, state in kept:
            vars(accumulator).update(state)


@contextlib.contextmanager
def _merging(norms: Sequence[Any], moments: list[tf.Tensor]) -> Iterator[None]:
    """Stops `BatchNormLayer`s inside from assigning, and merges their moments into `moments`."""
    numbers = {id(norm.vars.moving_mean): number for number, norm in enumerate(norms)}
    assigned = {id(norm.vars.moving_variance) for norm in norms}
    compute, update = bn_layers.ComputeMoments, py_utils.UpdateBatchNormVars
    computed: dict[int, Any] = {}
    updated: set[int] = set()

    def compute_moments(inputs: tf.Tensor, padding: tf.Tensor, *args: Any, **kwargs: Any) -> Any:
        mean, variance = compute(inputs, padding, *args, **kwargs)
        computed[id(mean)] = inputs, padding, mean, variance
        return mean, variance

    def update_average(variable: Any, value: tf.Tensor, decay: float) -> Any:
        if id(variable) in assigned:
            return tf.no_op()
        if id(variable) not in numbers:
            return update(variable, value, decay)
        number = numbers[id(variable)]
        _check_once(norms[number], number in updated)
        updated.add(number)
        of_norm = slice(number * _COUNT, (number + 1) * _COUNT)
        moments[of_norm] = merged_moments(moments[of_norm], _moments(*computed[id(value)]))
        return tf.no_op()

    bn_layers.ComputeMoments, py_utils.UpdateBatchNormVars = compute_moments, update_average
    try:
        yield
    finally:
        bn_layers.ComputeMoments, py_utils.UpdateBatchNormVars = compute, update


def _check_once(norm: Any, is_second: bool) -> None:
    where = f"{norm.path}: in a pipeline a {type(norm).__name__}"
    if is_second:
        raise PipelineError(
            f"{where} cannot be called twice a step, since it averages twice; make two layers"
        )
    if norm.params.use_moving_avg_in_training:
        raise PipelineError(
            f"{where} cannot normalize by averages that change in the step; leave "
            "use_moving_avg_in_training unset"
        )


def _moments(
    inputs: tf.Tensor, padding: tf.Tensor, mean: tf.Tensor, variance: tf.Tensor
) -> Sequence[tf.Tensor]:
    shape = tf.concat([tf.shape(inputs)[:-1], [1]], 0)
    rows = tf.reduce_sum(1.0 - tf.broadcast_to(tf.cast(padding, tf.float32), shape))
    rows = tf.reshape(rows, [1])
    return rows, tf.cast(mean, tf.float32), tf.cast(variance, tf.float32) * rows


def finish_carries(
    stages: Sequence[Any], carries: Sequence[Sequence[tf.Tensor]], outputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Sets accumulators and moving averages to their values after the step; returns the outputs.

    Do not call it in evaluation. No step ends there, after which accumulators are reset. So a
    training graph traced later would start with tensors of the evaluation graph.
    """
    statistics: list[tf.Tensor] = []
    for stage, carry in zip(stages, carries, strict=True):
        count = len(stage.accumulators.Flatten())
        stage.SetAccumulatorValues(stage.accumulators.Pack(carry[:count]))
        for number, norm in enumerate(_norms(stage)):
            rows, mean, squares = carry[count + number * _COUNT :][:_COUNT]
            for variable, value in (
                (norm.vars.moving_mean, mean),
                (norm.vars.moving_variance, squares / tf.maximum(rows, 1.0)),
            ):
                # Without rows the average stays.
                value = tf.where(rows > 0, value, tf.cast(variable, value.dtype))
                py_utils.UpdateBatchNormVars(variable, value, norm.params.decay)
                statistics.append(value)
    if not statistics or tf.compat.v1.executing_eagerly_outside_functions():
        return outputs
    # In a TF1 graph lingvo runs only those updates that the loss depends on.
    with tf.control_dependencies(statistics):
        return [tf.identity(t) for t in outputs]
