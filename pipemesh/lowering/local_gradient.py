"""Gradients of functions of slices, computed on the slices' device."""

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
    """Calls a function on a device, where its gradient will be computed as well.

    Autodiff forgets device scopes: all gradients would be computed on the first device. In eager
    mode nothing is done about it.

    Args:
        function: of tensors, without side effects; may not use tensors that are no arguments.
        tensors: its arguments.
        device: where.

    Raises:
        GradientError: it uses a tensor or variable whose gradient would be lost.
    """
    with tf.device(device):
        if tf.executing_eagerly():
            return call_local(function, tensors)
        # Through identities, so that an argument that occurs twice, or that was computed from
        # another one, is an argument of its own. A second derivative is one of what is computed
        # here from the identities, so tapes that may ask for one follow them.
        higher = is_recorded_twice(tensors)
        with contextlib.nullcontext() if higher else unrecorded():
            args = [tf.identity(tensor) for tensor in tensors]
        floating = [i for i, arg in enumerate(args) if arg.dtype.is_floating]
        sources = [args[i] for i in floating]
        # A tape of its own knows what is local. `tf.gradients` would look at all that follows, for
        # each function again; other tapes do not watch the identities, and record nothing.
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
