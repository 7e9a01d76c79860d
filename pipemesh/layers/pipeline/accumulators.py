"""The carry of a stage: values that it sums or averages over microbatches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.layers.pipeline.batch_norm import (
    merged_moments,
    no_moments,
    norms_of,
    update_averages,
)


def first_carry(stage: Any) -> list[tf.Tensor]:
    """Returns the values of accumulators before a step, and the moments of an empty batch."""
    return [*stage.GetAccumulatorValues().Flatten(), *no_moments(_norms(stage))]


@contextlib.contextmanager
def carried(stage: Any, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
    """Makes a stage compute with a carry; yields a function that returns the microbatch's carry.

    Afterwards accumulators have their earlier state, even if it was empty, because values set
    inside belong to the stage's graph. Restoring the result of `GetValue` would not work: for an
    accumulator that was reset it makes a tensor in the current graph.
    """
    kept = [(accumulator, dict(vars(accumulator))) for accumulator in stage.accumulators.Flatten()]
    count = len(kept)
    try:
        with merged_moments(_norms(stage), carry[count:]) as moments:
            stage.SetAccumulatorValues(stage.accumulators.Pack(carry[:count]))
            yield lambda: [
                tf.convert_to_tensor(value)
                for value in (
                    *stage.GetAccumulatorValues().Flatten(),
                    *(value for three in moments for value in three),
                )
            ]
    finally:
        for accumulator, state in kept:
            vars(accumulator).update(state)


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
        statistics += update_averages(_norms(stage), carry[count:])
    if not statistics or tf.compat.v1.executing_eagerly_outside_functions():
        return outputs
    with tf.control_dependencies(statistics):
        return [tf.identity(t) for t in outputs]


def _norms(stage: Any) -> list[Any]:
    """Returns the layers whose moments are carried; none in evaluation."""
    return [] if stage.do_eval else norms_of(stage)
