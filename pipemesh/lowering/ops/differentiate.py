"""Gradients with respect to tensors with named dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from pipemesh.errors import GradientError
from pipemesh.lowering.arguments import described
from pipemesh.lowering.tensor import Tensor
from pipemesh.lowering.variable import Variable


@tf.autograph.experimental.do_not_convert
def gradients(loss: Tensor, sources: Any, tape: tf.GradientTape | None = None) -> Any:
    """Returns gradients of a loss: equal under every layout and lowering, eagerly and in graphs.

    Under placement each processor has a copy of the loss, and only all copies together have the
    whole gradient: `tape.gradient(loss.slices[0], ...)` gives a part of it. `tape.gradient(loss,
    ...)` is right too; this function also checks its arguments and supports variables.

    Args:
        loss: a floating tensor; if it has dims, the sum of its elements is differentiated.
        sources: a nest of tensors, `Variable` objects, and TensorFlow's tensors or variables, such
            as imported ones or slices.
        tape: recorded the computation of the loss and watched the sources. Not needed in graphs of
            TensorFlow 1 and in a `tf.function`.

    Returns:
        The structure of `sources`. Tensors and `Variable` objects get tensors of the same shape and
        layout; TensorFlow's get TensorFlow's tensors. A source that the loss does not depend on, or
        that the tape did not watch, gets None.

    Raises:
        GradientError: there is neither a tape nor a graph, or a dtype is not floating.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.lowering import PlacementLowering, ops
        >>> from pipemesh.mesh import LayoutRules, Mesh
        >>> mesh, rules = Mesh.from_text("model:2"), LayoutRules.from_text("hidden:model")
        >>> lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:0"])
        >>> w = ops.import_tensor(lowering, [1.0, 2.0, 3.0, 4.0], "hidden:4")
        >>> with tf.GradientTape() as tape:
        ...     tape.watch(w)
        ...     loss = ops.reduce_sum(w * w)
        >>> ops.gradients(loss, {"w": w}, tape)["w"].numpy().tolist(), float(loss)
        ([2.0, 4.0, 6.0, 8.0], 30.0)
    """
    if not isinstance(loss, Tensor) or not loss.dtype.is_floating:
        raise GradientError(
            f"the loss is {described(loss)}; it is a floating tensor with named dims, or with "
            "none, such as ops.reduce_mean(x)"
        )
    flat = tf.nest.flatten(sources)
    parts = [list(part.variables) if isinstance(part, Variable) else [part] for part in flat]
    for part in (part for group in parts for part in group):
        if not hasattr(part, "dtype") or not tf.as_dtype(part.dtype).is_floating:
            raise GradientError(
                f"{described(part)} has no gradient; sources are tensors and variables of a "
                "floating dtype"
            )
    found = _differentiate(loss.slices, parts, tape)
    loss.lowering.warn_of_misspelt_rules()
    return tf.nest.pack_sequence_as(
        sources,
        [
            _named(loss, part, grads) if isinstance(part, Variable) else grads[0]
            for part, grads in zip(flat, found, strict=True)
        ],
    )


def _differentiate(
    slices: Sequence[tf.Tensor], parts: list[list[Any]], tape: tf.GradientTape | None
) -> list[list[Any]]:
    if tape is not None:
        found: Any = tape.gradient(list(slices), parts)
        return found
    if tf.executing_eagerly():
        raise GradientError(
            "without a graph, gradients need the tape that recorded the computation: with "
            "tf.GradientTape() as tape: tape.watch(w); loss = ...; then ops.gradients(loss, w, "
            "tape)"
        )
    grads = iter(tf.gradients(list(slices), [part for group in parts for part in group]))
    return [[next(grads) for _ in group] for group in parts]


def _named(loss: Tensor, variable: Variable, grads: Sequence[Any]) -> Tensor | None:
    if len(grads) != loss.lowering.num_slices:
        raise GradientError(
            f"variable {variable.name!r} has {len(grads)} slices in this process, but the loss was "
            f"computed for {loss.lowering.num_slices} processors; a core differentiates by the "
            "slice that is its argument"
        )
    return Tensor.__tf_unflatten__((loss.lowering, variable.layout.shape), tuple(grads))
