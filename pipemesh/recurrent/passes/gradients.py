"""The gradient of a traced stage, added to its graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.structure import Gradient, is_differentiable
from pipemesh.recurrent.stage import Stage

# The tensor of a gradient; values and row indices if it is sparse; None if there is no gradient.
GradName = str | tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class StageGradients:
    """Names of the gradients in a traced graph.

    Attributes:
        of_outputs: placeholder for the gradient of each floating output, by its index.
        of_carry_out: the same for the carry that the stage returns; empty if it has no gradient.
        of_theta: the gradient of each theta.
        of_inputs: the gradient of each input, None if there is none.
        of_carry: the gradient of each carry that the stage takes, None if there is none.
        of_probes: the gradient of each probed tensor.
    """

    of_outputs: dict[int, str]
    of_carry_out: dict[int, str]
    of_theta: list[GradName]
    of_inputs: list[str | None]
    of_carry: list[str | None]
    of_probes: list[str | None]


def differentiate(
    stage: Stage,
    theta: list[tf.Tensor | None],
    carry: list[tf.Tensor],
    inputs: list[tf.Tensor],
    outputs: dict[int, tf.Tensor],
    carry_out: list[tf.Tensor],
    probed: list[tf.Tensor],
    devices: tuple[Sequence[str], Sequence[str]] | None = None,
) -> StageGradients:
    """Adds the gradient of a traced stage to its graph, which is being built.

    Args:
        stage: the stage.
        theta: placeholders of the weights; None for weights without a gradient.
        carry: placeholders of the carry.
        inputs: placeholders of the inputs.
        outputs: the outputs with an incoming gradient, by index.
        carry_out: the carry that the stage returns.
        probed: other tensors whose gradient is needed.
        devices: for the first of theta, and for all inputs, the devices of their gradients; None if
            there is one device.
    """
    of_outputs = _grad_placeholders(outputs)
    of_carry_out = _grad_placeholders(dict(enumerate(carry_out))) if stage.recurrent else {}
    results = [outputs[i] for i in of_outputs] + [carry_out[i] for i in of_carry_out]
    states = carry if stage.recurrent else []
    sources = [*theta, *inputs, *states, *probed]
    grads = _gradients(results, sources, [*of_outputs.values(), *of_carry_out.values()])
    if devices is not None:
        for first, names in ((0, devices[0]), (len(theta), devices[1])):
            for i, device in enumerate(names, first):
                grad = grads[i]
                # A sparse gradient is on the device of the lookup.
                if isinstance(grad, tf.Tensor):
                    with tf.device(device):
                        grads[i] = tf.identity(grad)
    dense = [
        None if grad is None else tf.convert_to_tensor(grad).name for grad in grads[len(theta) :]
    ]
    return StageGradients(
        of_outputs={i: t.name for i, t in of_outputs.items()},
        of_carry_out={i: t.name for i, t in of_carry_out.items()},
        of_theta=[_grad_name(grad) for grad in grads[: len(theta)]],
        of_inputs=dense[: len(inputs)],
        of_carry=dense[len(inputs) :][: len(states)] if states else [None] * len(carry),
        of_probes=dense[len(inputs) + len(states) :],
    )


def _grad_placeholders(tensors: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    placeholders: dict[int, tf.Tensor] = {}
    for i, t in tensors.items():
        if is_differentiable(t):
            with tf.device(t.device):
                placeholders[i] = tf.compat.v1.placeholder(t.dtype, t.shape)
    return placeholders


def _gradients(
    results: list[tf.Tensor], sources: list[tf.Tensor | None], result_grads: list[tf.Tensor]
) -> list[Gradient]:
    # The handle represents its variable.
    floating = {
        i: t
        for i, t in enumerate(sources)
        if t is not None and (is_differentiable(t) or t.dtype == tf.resource)
    }
    grads: list[Gradient] = [None] * len(sources)
    if results and floating:
        found = tf.gradients(results, list(floating.values()), result_grads)
        for i, grad in zip(floating, found, strict=True):
            grads[i] = grad
    return grads


def _grad_name(grad: Gradient) -> GradName:
    if isinstance(grad, tf.IndexedSlices):
        return grad.values.name, grad.indices.name
    return None if grad is None else grad.name


def flat_names(names: Iterable[GradName | tuple[str, ...]]) -> list[str]:
    """Returns the names of all tensors; a sparse gradient has two, a missing one none."""
    flat: list[str] = []
    for name in names:
        if name is not None:
            flat.extend([name] if isinstance(name, str) else name)
    return flat
