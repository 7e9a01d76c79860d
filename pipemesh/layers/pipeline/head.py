"""Checks of the last layer's results during tracing."""

from __future__ import annotations

from collections.abc import Sequence

import tensorflow as tf

from pipemesh.errors import PipelineError

_CONTRACT = (
    "with loss_inside the last layer returns the microbatch's summed loss (a floating scalar), "
    "the summed weight that the batch's loss is divided by (a scalar), and metrics, if any: "
    "return tf.reduce_sum(xent * weights), tf.reduce_sum(weights)"
)


def check_head(
    where: str, names: Sequence[str], outputs: Sequence[tf.Tensor], loss_inside: bool
) -> None:
    """Checks the results of the last stage for one microbatch.

    Raises:
        PipelineError: they cannot be combined to the whole batch's outputs.
    """
    if loss_inside:
        _check_loss(where, names, outputs)
        return
    for name, output in zip(names, outputs, strict=True):
        if output.shape.rank == 0:
            raise PipelineError(
                f"{where} returns a scalar ({name}), which cannot be joined over microbatches; "
                "return it for each example, with the batch dim, or, if it is the loss, set "
                "loss_inside=True and return the summed loss and the summed weight"
            )


def with_total_weight(outputs: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns loss, weight and metrics of the whole batch; the weight is summed over the parts."""
    loss, weight, *metrics = outputs
    with tf.device(weight.device):
        return [loss, tf.reduce_sum(tf.cast(weight, loss.dtype)), *metrics]


def _check_loss(where: str, names: Sequence[str], outputs: Sequence[tf.Tensor]) -> None:
    given = ", ".join(
        f"{name}: {output.dtype.name} of shape {output.shape}"
        for name, output in zip(names, outputs, strict=True)
    )
    if list(names[:2]) != ["outputs.0", "outputs.1"]:
        raise PipelineError(f"{where} returns {given}, and no weight after it; {_CONTRACT}")
    loss, weight = outputs[:2]
    if loss.shape.rank != 0 or not loss.dtype.is_floating:
        raise PipelineError(f"{where} returns {given}; outputs.0 is no loss: {_CONTRACT}")
    if weight.shape.rank != 0 or not (weight.dtype.is_floating or weight.dtype.is_integer):
        raise PipelineError(f"{where} returns {given}; outputs.1 is no weight: {_CONTRACT}")
    if _is_mean(loss, weight):
        raise PipelineError(
            f"{where}: the loss (outputs.0) is a mean, {_origin(loss).op.type}, but the weight "
            f"(outputs.1) is not 1, so that dividing by it would divide twice; {_CONTRACT}"
        )


def _is_mean(loss: tf.Tensor, weight: tf.Tensor) -> bool:
    """Returns whether the graph shows that a loss was already divided by its weight."""
    if tf.get_static_value(weight) == 1:
        return False
    operation = _origin(loss).op
    if operation.type == "Mean":
        return operation.inputs[0].shape.num_elements() != 1
    if operation.type in ("RealDiv", "DivNoNan"):
        return _origin(operation.inputs[1]) is _origin(weight)
    return False


def _origin(tensor: tf.Tensor) -> tf.Tensor:
    """Returns the origin of a value, before identities and casts."""
    while tensor.op.type in ("Cast", "Identity", "EnsureShape"):
        tensor = tensor.op.inputs[0]
    return tensor
