"""A loop over time whose gradient is a loop back over time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.gradients import custom_gradient, without_colocation
from pipemesh.backend.structure import is_differentiable
from pipemesh.recurrent.time.cell import Arguments, groups
from pipemesh.recurrent.time.time_loop import Captures, ResultGradients, Span, TimeLoop


class Results(NamedTuple):
    """The results of a loop, as flat lists.

    Attributes:
        acc_state: the states over time; empty if `acc_out` replaces them.
        acc_out: the results of the loop's `out` over time.
        state: the final state.
        accumulators: their final values, without gradient.
        acc_extras: the extras over time, if requested.
    """

    acc_state: list[tf.Tensor]
    acc_out: list[tf.Tensor]
    state: list[tf.Tensor]
    accumulators: list[tf.Tensor]
    acc_extras: list[tf.Tensor]


def run_loop(loop: TimeLoop, given: Arguments, captures: Captures, span: Span) -> Results:
    """Runs the loop forward, and backward when a gradient is requested.

    Args:
        loop: the loop.
        given: flat lists of tensors; the inputs over time, in dim 0.
        captures: values of the outside tensors that the loop uses.
        span: the time steps to compute.
    """
    arguments = [*given, *captures]
    device = loop.cell.cell.device
    sizes: list[int] = []

    @custom_gradient
    def run(*tensors: tf.Tensor) -> Any:
        # Else a tape would record the loop, and keep all intermediate tensors of each time step.
        parts = list(groups((tf.stop_gradient(x) for x in tensors), arguments))
        values, captured = Arguments(*parts[: len(given)]), Captures(*parts[len(given) :])
        with tf.device(device):
            forward = loop.forward(values, captured, span)
            over_time = loop.stacked_extras(values, forward)
        acc_state = [] if loop.out else forward.acc_state
        results = Results(
            acc_state, forward.acc_out, forward.state, forward.accumulators, over_time
        )
        sizes[:] = [len(part) for part in results]

        def grad(*d_results: tf.Tensor) -> list[Any]:
            with without_colocation(), tf.device(device):
                given_grads = Results(*groups(d_results, results))
                differentiable = Results(*map(_differentiable, given_grads, results))
                grads = loop.backward(
                    values,
                    captured,
                    forward,
                    ResultGradients(
                        differentiable.acc_state,
                        differentiable.acc_out,
                        differentiable.state,
                        [] if loop.cell.cell.gradient else differentiable.acc_extras,
                    ),
                )
                flat = [
                    *(*grads.theta, *grads.state, *(None for _ in given.accumulators)),
                    *(*grads.inputs, *grads.captures, *grads.out_captures),
                    *(None for _ in captures.stop),
                ]
                # It depends on the states over time, which are constants here.
                why = "Recurrent has no gradient of its gradient"
                return [None if g is None else _without_gradient(g, why) for g in flat]

        return [x for part in results for x in part], grad

    flat = run(*(x for part in arguments for x in part))
    results = Results(*groups(flat, [range(size) for size in sizes]))
    if loop.cell.cell.gradient:
        why = "a cell_grad takes no gradient of the extras that Recurrent returns"
        results = results._replace(
            acc_extras=[_without_gradient(x, why) for x in results.acc_extras]
        )
    return results


def _without_gradient(tensor: tf.Tensor, why: str) -> tf.Tensor:
    """Returns the tensor; a gradient through it raises a LookupError with this message."""
    return tf.raw_ops.PreventGradient(input=tensor, message=why)


def _differentiable(gradients: Sequence[tf.Tensor], of: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the gradients of differentiable tensors, on the current device.

    A loop that uses tensors of another device runs on both devices, and they wait for each other.
    """
    return [tf.identity(g) for g, x in zip(gradients, of, strict=True) if is_differentiable(x)]
