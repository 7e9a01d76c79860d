"""Norms of all gradients where several processes have some of the weights each."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import learner, py_utils

from pipemesh.backend.processes import current_processes
from pipemesh.backend.saved_state import owner_of
from pipemesh.lowering.simd.process_lowering import over_processes

# The variables of the learner that scales its gradients now.
_scaled: contextvars.ContextVar[Sequence[tf.Variable] | None] = contextvars.ContextVar(
    "scaled", default=None
)
_MARK = "_pipemesh_whole"


def take_whole_norms() -> None:
    """Lets lingvo's learners clip by the norms of all weights, those of other processes too.

    Each weight, or slice, counts once, in the process that speaks for it.
    """
    if not hasattr(learner.Learner.ScaleGradients, _MARK):
        learner.Learner.ScaleGradients = _noting(learner.Learner.ScaleGradients)
        py_utils.SumSquared = _whole(py_utils.SumSquared)


def _noting(scale: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scale)
    def noting(self: Any, var_grads: Any, *args: Any, **kwargs: Any) -> Any:
        token = _scaled.set([variable for variable, _ in var_grads.Flatten()])
        try:
            return scale(self, var_grads, *args, **kwargs)
        finally:
            _scaled.reset(token)

    setattr(noting, _MARK, True)
    return noting


def _whole(sum_squared: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(sum_squared)
    def whole(tensors: Sequence[Any]) -> Any:
        variables, processes = _scaled.get(), current_processes()
        if variables is None or processes is None or len(tensors) != len(variables):
            return sum_squared(tensors)
        own = [
            tensor
            for tensor, variable in zip(tensors, variables, strict=True)
            if owner_of(variable) == processes.index
        ]
        return over_processes(tf.convert_to_tensor(sum_squared(own)), "sum")

    return whole
