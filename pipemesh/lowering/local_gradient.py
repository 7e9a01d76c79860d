"""Gradients of functions of slices, computed on the device of the slices."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.gradients import attach_gradient, is_recorded_twice, unrecorded
from pipemesh.lowering.captures import call_local


def local_gradient(
    function: Callable[..., tf.Tensor], tensors: Sequence[tf.Tensor], device: str
) -> tf.Tensor:
    """Calls a function on a device and computes its gradient there.

    TensorFlow's autodiff forgets device scopes: it would compute all gradients on the first device.
    Eager mode keeps that behavior. The function must be pure and use no differentiable values
    except `tensors`; otherwise it raises a GradientError.
    """
    with tf.device(device):
        if tf.executing_eagerly():
            return call_local(function, tensors)
        # Identities make each argument separate, even if it occurs twice or was computed from
        # another argument. A second derivative differentiates operations that use the identities,
        # so tapes that may compute one watch them.
        higher = is_recorded_twice(tensors)
        with contextlib.nullcontext() if higher else unrecorded():
            args = [tf.identity(tensor) for tensor in tensors]
        floating = [i for i, arg in enumerate(args) if arg.dtype.is_floating]
        sources = [args[i] for i in floating]
        # This tape sees the local operations alone. `tf.gradients` would search all later
        # operations for each function again. Other tapes do not watch the identities and record
        # nothing.
        with tf.GradientTape(persistent=True, watch_accessed_variables=False) as tape:
            tape.watch(sources)
            output = call_local(function, args)
        if not output.dtype.is_floating or not floating:
            return output

        def backward(grads: Sequence[Any]) -> Sequence[Any]:
            with tf.device(device):
                return tape.gradient(output, sources, list(grads))

        inputs = [tensors[i] for i in floating]
        return attach_gradient([output], inputs, backward, across_devices=False)[0]
