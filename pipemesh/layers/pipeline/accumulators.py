"""What a stage counts or averages over microbatches: its carry."""

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
    """The values of accumulators before a step, and the moments of no batch."""
    return [*stage.GetAccumulatorValues().Flatten(), *no_moments(_norms(stage))]


@contextlib.contextmanager
def carried(stage: Any, carry: Sequence[tf.Tensor]) -> Iterator[Callable[[], list[tf.Tensor]]]:
    """Inside, a stage computes with a carry.

    Accumulators have afterwards what they had before, even if that was nothing: what they are given
    inside belongs to the graph of the stage. To set them to what `GetValue` said would not do: of
    those that have begun anew it makes a tensor, in the graph of that moment.

    Args:
        stage: the layer.
        carry: of the microbatch before.

    Yields:
        What tells the carry of this microbatch.
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
    """Gives accumulators and moving averages what the step has brought them to.

    Not for an evaluation: no step ends with it, after which accumulators would begin anew, so what
    trains, if it is traced afterwards, would begin with tensors of what evaluates.

    Args:
        stages: the layers.
        carries: what each has carried out of the step.
        outputs: of the last stage.

    Returns:
        The outputs.
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
    """The layers whose moments are carried; while it evaluates a stage has none."""
    return [] if stage.do_eval else norms_of(stage)
