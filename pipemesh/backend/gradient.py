"""Gives tensors a gradient that is computed as a whole, in both execution modes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.kept_gradients import custom_gradient
from pipemesh.backend.structure import is_differentiable

Grads = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class Sources:
    """Tensors on one device that gradients flow to.

    Attributes:
        tensors: of any dtype; only the floating and complex ones get a gradient.
        device: where they lie.
        checked: called with their gradients when somebody asks for them; returns what to hand on.
    """

    tensors: Sequence[tf.Tensor]
    device: str
    checked: Callable[[Grads], Grads] | None = None


def with_gradient(
    outputs: Sequence[tf.Tensor],
    device: str,
    sources: Sequence[Sources],
    backward: Callable[[Grads], list[Grads]],
) -> list[tf.Tensor]:
    """Returns `outputs`, through which gradients flow to all `sources` at once.

    `tf.custom_gradient` passes everything that it differentiates through one operation, which
    would copy the weights of all stages to one device. Here each group of sources has an
    operation of its own, on its device, that hands a scalar on; only these scalars meet. When
    the gradient arrives at the outputs, `backward` computes all gradients, and each group picks
    up its own when autodiff reaches its scalar.

    Args:
        outputs: tensors that do not carry a gradient themselves (`tf.stop_gradient`).
        device: where the outputs lie.
        sources: the groups of tensors that get gradients.
        backward: called once a gradient is asked for, with the gradient of each output (None for
            those that have none); returns for each group the gradient of each tensor.
    """
    computed: dict[int, Grads] = {}
    anchors = [_anchor(number, group, computed) for number, group in enumerate(sources)]
    floating = [i for i, t in enumerate(outputs) if is_differentiable(t)]

    @custom_gradient
    def attach(*tensors: tf.Tensor) -> Any:
        attached = [tf.identity(t) for t in tensors[: len(floating)]]

        def grad(*attached_grads: tf.Tensor) -> Grads:
            with without_colocation():
                output_grads: Grads = [None] * len(outputs)
                for i, value in zip(floating, attached_grads, strict=True):
                    output_grads[i] = value
                computed.update(enumerate(backward(output_grads)))
                return [None] * len(floating) + [tf.zeros([]) for _ in anchors]

        return attached, grad

    result = list(outputs)
    if floating:
        with tf.device(device):
            attached = attach(*(outputs[i] for i in floating), *anchors)
        for i, value in zip(floating, attached, strict=True):
            result[i] = value
    return result


def without_colocation() -> contextlib.AbstractContextManager[Any]:
    """Inside, operations lie where `tf.device` says.

    Autodiff may ask for all operations to lie with the one that is differentiated.
    """
    return tf.compat.v1.get_default_graph().colocate_with(None, ignore_existing=True)


def _anchor(number: int, group: Sources, computed: dict[int, Grads]) -> tf.Tensor:
    """A scalar whose gradient is that of all floating tensors of the group."""
    floating = [i for i, t in enumerate(group.tensors) if is_differentiable(t)]

    @custom_gradient
    def anchor(*tensors: tf.Tensor) -> Any:
        del tensors

        def grad(_: tf.Tensor) -> list[tf.Tensor | None]:
            grads = computed.pop(number)
            if group.checked is not None:
                with without_colocation():
                    grads = group.checked(grads)
            return [grads[i] for i in floating]

        return tf.zeros([]), grad

    with tf.device(group.device):
        return anchor(*(group.tensors[i] for i in floating)) if floating else tf.zeros([])
