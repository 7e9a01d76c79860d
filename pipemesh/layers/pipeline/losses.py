"""The loss inside a pipeline, and auxiliary losses of its layers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.gradients import custom_gradient
from pipemesh.errors import PipelineError
from pipemesh.layers.named.scope import exported
from pipemesh.layers.pipeline.stage import StageStructure
from pipemesh.recurrent import Home

ACCUMULATIONS = ("mean", "sum")


def has_context() -> bool:
    """Returns whether an `AuxLossContext` is entered."""
    return py_utils.AuxLossContext.Current() is not None


def carrying(
    forward: Callable[..., Any], number: int, p: Any, home: Home, structures: list[Any]
) -> Callable[..., Any]:
    """Returns a stage's function that also passes on its own losses and those of earlier stages.

    Layers find the losses of earlier layers in their context, as in the plain stack. Each structure
    records the losses that go with it.
    """
    if not has_context():
        return forward
    where, num_parts = f"{p.name}: stage {p.cell_tpl[number].name!r}", _num_parts(p, home)

    def called(theta: Any, carry: Any, inputs: Any, *position: Any) -> tuple[list[Any], list[Any]]:
        noted = structures[number].aux_losses
        split = len(inputs) - len(noted)
        before = list(inputs[split:])
        with _Context(where, p, num_parts) as context:
            context.aux_loss_tensors[:] = before
            outputs, carry = forward(theta, carry, inputs[:split], *position)
        losses = [tf.convert_to_tensor(exported(loss)) for loss in context.aux_losses]
        structures[number + 1].aux_losses = [loss.shape.rank == 0 for loss in losses]
        if number + 1 < len(p.cell_tpl) or p.loss_inside:
            return [*outputs, *losses], carry
        size = _size(outputs[0].shape, p.batch_dim)
        return [*outputs, *(_by_example(loss, size, p, where) for loss in losses)], carry

    return called


def take_out(
    p: Any, home: Home, structure: StageStructure, outputs: list[tf.Tensor]
) -> list[tf.Tensor]:
    """Adds the losses, the last outputs, to the context around the pipeline; returns the others."""
    split = len(outputs) - len(structure.aux_losses)
    outputs, losses = list(outputs[:split]), outputs[split:]
    around: Any = py_utils.AuxLossContext.Current()
    for is_scalar, loss in zip(structure.aux_losses, losses, strict=True):
        with tf.device(loss.device):
            if is_scalar:
                parts = tf.reshape(loss, [_num_parts(p, home), -1])[:, 0]
                wide = tf.cast(parts, tf.float32) if parts.dtype.size < 4 else parts
                is_sum = p.loss_inside or p.aux_loss_microbatch_accumulation == "sum"
                whole = tf.reduce_sum(wide) if is_sum else tf.reduce_mean(wide)
                loss = tf.cast(whole, loss.dtype)
            if p.loss_inside:
                loss = _without_gradient(p.name, outputs[0], loss)
        around.AddLoss(loss)
    return outputs


class _Context(py_utils.AuxLossContext):
    """A context that checks losses as layers add them."""

    def __init__(self, where: str, p: Any, num_parts: int) -> None:
        super().__init__(reentrant=True)
        self._where, self._params, self._num_parts = where, p, num_parts

    def AddLoss(self, loss: Any) -> None:
        p = self._params
        if p.lowering == "simd":
            raise PipelineError(
                f"{self._where}: a layer adds to AuxLossContext, but with lowering='simd' stages "
                "hand on what they are given alone; use lowering='placement'"
            )
        scalar = tf.convert_to_tensor(exported(loss)).shape.rank == 0
        if scalar and self._num_parts > 1 and p.aux_loss_microbatch_accumulation is None:
            raise PipelineError(
                f"{self._where}: a layer adds a scalar to AuxLossContext, one for each of "
                f"{self._num_parts} parts of the batch. Set aux_loss_microbatch_accumulation of "
                "the pipeline: 'mean' if the loss is a mean over examples, 'sum' if it is a sum"
            )
        if scalar and p.loss_inside and p.aux_loss_microbatch_accumulation == "mean":
            # A head adds it to its own loss, which is summed over the parts of the batch.
            loss = exported(loss) / self._num_parts
        super().AddLoss(loss)


def check_none_before(p: Any) -> None:
    """Raises a PipelineError if a layer before the stages added a loss that a head would look for.

    The head of the plain stack would find it in the context; the head of a stage would not.
    """
    context: Any = py_utils.AuxLossContext.Current()
    if p.loss_inside and context is not None and context.aux_losses:
        raise PipelineError(
            f"{p.name}: {len(context.aux_losses)} losses were added to AuxLossContext before the "
            "stages, whose head would not find them; with loss_inside let stages alone add losses, "
            "or enter an AuxLossContext for the stack alone"
        )


def refused(p: Any) -> contextlib.AbstractContextManager[Any]:
    """Makes a layer inside raise an error if it adds a loss to the context around the pipeline."""
    return _Context(p.name, p, 1) if has_context() else contextlib.nullcontext()


def _num_parts(p: Any, home: Home) -> int:
    """Returns the number of parts of the batch that a stage is called for."""
    return p.num_micro_batches * home.num_replicas


def _size(shape: tf.TensorShape, batch_dim: int) -> int | None:
    return shape[batch_dim] if shape.rank is not None and shape.rank > batch_dim else None


def _by_example(loss: tf.Tensor, size: int | None, p: Any, where: str) -> tf.Tensor:
    """Returns a loss with a value for each example, so that parts of the batch can be joined."""
    if loss.shape.rank == 0:
        return tf.broadcast_to(loss, [*[1] * p.batch_dim, size or 1])
    if size is not None and _size(loss.shape, p.batch_dim) != size:
        raise PipelineError(
            f"{where}: a layer here or before adds a tensor of shape {loss.shape} to "
            f"AuxLossContext; add a scalar, or a value for each of the {size} examples in dim "
            f"{p.batch_dim} (batch_dim)"
        )
    return loss


def _without_gradient(name: str, loss: tf.Tensor, aux_loss: tf.Tensor) -> tf.Tensor:
    """Returns a loss whose gradient is an error.

    The gradient is already computed when the loss leaves the pipeline. The pipeline's loss is an
    argument, so autodiff reaches this function on its way to the weights.
    """

    def grad(_: tf.Tensor) -> Any:
        raise PipelineError(
            f"{name}: with loss_inside a loss of AuxLossContext has no gradient outside. Let the "
            "last layer add it to its loss: py_utils.AuxLossContext.Current().aux_losses has those "
            "of all layers before, for the microbatch"
        )

    @custom_gradient
    def attach(aux_loss: tf.Tensor, loss: tf.Tensor) -> Any:
        del loss
        return tf.identity(aux_loss), grad

    return attach(aux_loss, loss)


_CONTRACT = (
    "with loss_inside the last layer returns the microbatch's summed loss (a floating scalar), "
    "the summed weight that the batch's loss is divided by (a scalar), and metrics, if any: "
    "return tf.reduce_sum(xent * weights), tf.reduce_sum(weights)"
)


def check_head(
    where: str, names: Sequence[str], outputs: Sequence[tf.Tensor], loss_inside: bool
) -> None:
    """Checks the results of the last stage for one microbatch."""
    if not loss_inside:
        for name, output in zip(names, outputs, strict=True):
            if output.shape.rank == 0:
                raise PipelineError(
                    f"{where} returns a scalar ({name}), which cannot be joined over microbatches; "
                    "return it for each example, with the batch dim, or, if it is the loss, set "
                    "loss_inside=True and return the summed loss and the summed weight"
                )
        return
    described = ", ".join(
        f"{name}: {output.dtype.name} of shape {output.shape}"
        for name, output in zip(names, outputs, strict=True)
    )
    if list(names[:2]) != ["outputs.0", "outputs.1"]:
        raise PipelineError(f"{where} returns {described}, and no weight after it; {_CONTRACT}")
    loss, weight = outputs[:2]
    if loss.shape.rank != 0 or not loss.dtype.is_floating:
        raise PipelineError(f"{where} returns {described}; outputs.0 is no loss: {_CONTRACT}")
    if weight.shape.rank != 0 or not (weight.dtype.is_floating or weight.dtype.is_integer):
        raise PipelineError(f"{where} returns {described}; outputs.1 is no weight: {_CONTRACT}")
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
