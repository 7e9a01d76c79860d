"""Normalization and dropout over named dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh import randomness
from pipemesh.backend.gradients import attach_gradient
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_above_zero, check_choice, check_flags, check_whole
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.step_seed import GenerateStepSeedPair, step_of_call, whole_batch_randomness
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.elementwise import broadcast
from pipemesh.lowering.tensor import union_axes

KINDS = ("layer", "rms")


class Norm(NamedLayer):
    """Layer norm (Ba et al., 2016) or RMS norm (Zhang and Sennrich, 2019) over `embed`.

    As in lingvo, the factor is 1 plus the weight `scale`; with `direct_scale` it is the weight
    itself. Moments are computed in float32. If `embed` is split, each moment is one all-reduce of
    one number per token.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `input_dim`, `dim`, `kind`, `epsilon` and `direct_scale`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("dim", "embed", "Another name for `embed`; inputs then have named dims, it last.")
        p.Define(
            "kind",
            "layer",
            "'layer' takes the mean off, divides by the deviation, and adds a bias; 'rms' divides "
            "by the root of the mean square.",
        )
        p.Define("epsilon", 1e-6, "What is added to the mean square.")
        p.Define(
            "direct_scale", False, "Whether `scale` is the factor, and not what it has above 1."
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_choice(p.name, "kind", p.kind, KINDS)
        check_above_zero(p.name, "epsilon", p.epsilon)
        check_flags(p, ["direct_scale"])

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `scale`, and `bias` for layer norm."""
        zero, embed = py_utils.WeightInit.Constant(0.0), f"{p.dim}:{p.input_dim}"
        scale = py_utils.WeightInit.Constant(1.0) if p.direct_scale else zero
        bias = {"bias": (embed, zero)} if p.kind == "layer" else {}
        return {"scale": (embed, scale), **bias}

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Normalizes `batch;length;embed`, or other dims if the last is another one."""
        p = self.params
        x = self.Named(x, "batch;length;embed" if p.dim == "embed" else x.shape)
        weights = [self.Weight(theta, name) for name in self.NamedWeights(p)]
        if x.layout.axes[-1] is None:
            axes = union_axes([x, *weights])
            operands = [tensor.vary(axes) for tensor in (x, *weights)]
            return Tensor(x.lowering, x.lowering.map(self._WholeVectors, *operands), x.shape)
        centered = ops.cast(x, tf.float32)
        if p.kind == "layer":
            centered = centered - ops.reduce_mean(centered, p.dim)
        square = ops.reduce_mean(ops.square(centered), p.dim)

        def normalized(value: tf.Tensor, moment: tf.Tensor, *scale_and_bias: tf.Tensor) -> Any:
            scale, *bias = [tf.cast(weight, tf.float32) for weight in scale_and_bias]
            factor = scale if p.direct_scale else 1 + scale
            result = value * tf.math.rsqrt(moment + p.epsilon) * factor
            return tf.cast(result + bias[0] if bias else result, x.dtype)

        return broadcast(normalized, [centered, square, *weights], x.shape)

    def _WholeVectors(self, x: tf.Tensor, *weights: tf.Tensor) -> tf.Tensor:
        """Normalizes vectors that are not split.

        The gradient has a closed form (Ba et al., 2016; without means Zhang and Sennrich, 2019). It
        needs a third of autodiff's operations and keeps one tensor.
        """
        p = self.params
        value = tf.cast(x, tf.float32)
        if p.kind == "layer":
            value -= tf.reduce_mean(value, -1, keepdims=True)
        square = tf.reduce_mean(tf.square(value), -1, keepdims=True)
        inverse = tf.math.rsqrt(square + p.epsilon)
        normalized = value * inverse
        scale, *bias = [tf.cast(weight, tf.float32) for weight in weights]
        factor = scale if p.direct_scale else 1 + scale
        result = normalized * factor

        def backward(grads: Sequence[tf.Tensor]) -> list[tf.Tensor]:
            grad = tf.cast(grads[0], tf.float32)
            wanted = grad * factor
            along = tf.reduce_mean(wanted * normalized, -1, keepdims=True)
            dx = wanted - normalized * along
            if p.kind == "layer":
                dx -= tf.reduce_mean(wanted, -1, keepdims=True)
            others = list(range(grad.shape.rank - 1))
            sums = [tf.reduce_sum(grad * normalized, others)]
            sums += [tf.reduce_sum(grad, others)] if bias else []
            gradients = [dx * inverse, *sums]
            return [tf.cast(g, t.dtype) for g, t in zip(gradients, (x, *weights), strict=True)]

        output = tf.cast(result + bias[0] if bias else result, x.dtype)
        return attach_gradient([output], [x, *weights], backward, across_devices=False)[0]

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the moments, which are sent if `embed` is split."""
        dims = "batch;length;embed" if p.dim == "embed" else x.shape.names
        x = tally.given(x, dims, py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally).values()
        if tally.lowering.rules.axis(p.dim) is None:
            moment = tally.reduce(x, p.dim)
            tally.meet(x, *weights)
            tally.keep(tally.made(x.shape, x, tf.float32), tally.made(moment.shape, x, tf.float32))
            return tally.made(x.shape, x)
        centered = x if x.dtype == tf.float32 else tally.made(x.shape, x, tf.float32)
        if p.kind == "layer":
            mean = tally.reduce(centered, p.dim)
            tally.meet(centered, mean)
            centered = tally.made(x.shape, centered)
        moment = tally.reduce(centered, p.dim)
        axes = tally.meet(centered, moment, *weights)
        tally.keep(centered, moment)
        # The normalized values, for the gradient of the scale.
        tally.keep(tally.made(x.shape, centered), axes=axes)
        return tally.made(x.shape, x)


class Dropout(NamedLayer):
    """Sets elements to zero, and scales the others up; in evaluation it does nothing.

    The mask is keyed by the global step and the layer, and every processor has its slice of one
    mask. So it does not depend on the layout, nor on the stages and microbatches of a pipeline.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines the rate."""
        p = super().Params()
        p.Define("rate", 0.0, "Probability of an element to be dropped; 0 or more, less than 1.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        if not isinstance(p.rate, int | float) or not 0 <= p.rate < 1:
            raise PipelineError(
                f"{p.name}: rate is {p.rate!r}; it is the probability of being dropped, a number "
                "from 0 on and below 1"
            )

    def FProp(self, theta: Any, x: Tensor) -> Tensor:
        """Drops elements of `x`, which may have any dims."""
        del theta
        p = self.params
        x = self.Named(x, x.shape)
        if self.do_eval or p.rate == 0:
            return x
        if randomness.is_active():
            return ops.dropout(x, rate=p.rate, seed=GenerateStepSeedPair(p))
        # Outside a pipeline it is a stack of one layer.
        with whole_batch_randomness(step_of_call(self)), randomness.layer_scope(self.path):
            return ops.dropout(x, rate=p.rate, seed=GenerateStepSeedPair(p))

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any) -> Value:
        """Counts the mask; sizes without names are those of `batch;length;embed`."""
        x = (
            x
            if isinstance(x, Value)
            else tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        )
        if p.rate == 0:
            return x
        tally.keep(tally.made(x.shape, x, tf.bool))
        return tally.made(x.shape, x)
