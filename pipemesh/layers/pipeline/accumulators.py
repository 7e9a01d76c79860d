"""Accumulators of stages, around the trace of a stage and after a step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any


@contextlib.contextmanager
def kept_accumulators(layer: Any) -> Iterator[None]:
    """Lets accumulators have afterwards what they had before, even if that was nothing.

    What they are given inside belongs to the graph of a stage. To set them to what `GetValue` said
    would not do: of those that have begun anew it makes a tensor, in the graph of that moment.
    """
    kept = [(accumulator, dict(vars(accumulator))) for accumulator in layer.accumulators.Flatten()]
    try:
        yield
    finally:
        for accumulator, state in kept:
            vars(accumulator).update(state)


def set_accumulators(layers: Sequence[Any], values: Sequence[Sequence[Any]]) -> None:
    """Gives accumulators what the step has brought them to.

    Not for an evaluation: no step ends with it, after which they would begin anew, so what trains,
    if it is traced afterwards, would begin with tensors of what evaluates.
    """
    for layer, own in zip(layers, values, strict=True):
        layer.SetAccumulatorValues(layer.accumulators.Pack(own))
