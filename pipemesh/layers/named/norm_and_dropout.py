"""Normalization and dropout over named dims."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import bn_layers, py_utils, tshape

from pipemesh import randomness
from pipemesh.backend.gradients import attach_gradient
from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_above_zero, check_choice, check_flags, check_whole
from pipemesh.layers.named.named_layer import SPACE, NamedLayer
from pipemesh.layers.named.scope import is_unnamed
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.layers.step_seed import GenerateStepSeedPair, step_of_call, whole_batch_randomness
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.costs import operation
from pipemesh.lowering.ops.elementwise import broadcast
from pipemesh.lowering.tensor import union_axes
from pipemesh.mesh import Dim, Shape

KINDS = ("layer", "rms", "group")
# The dim of the channels of one group, beside the dim of the groups.
_OF_GROUP = "of_group"
# The accumulators of batch norm, each with its number of dims; see `merged_moments`.
_MOMENTS = {"counts": 0, "means": 1, "squares": 1}


class Norm(NamedLayer):
    """Layer norm (Ba et al., 2016), RMS norm (Zhang and Sennrich, 2019) or group norm (Wu and He,
    2018) over `embed`, or the dim `dim`.

    As in lingvo, the factor is 1 plus the weight `scale`; with `direct_scale` it is the weight
    itself. Moments are computed in float32. If `embed` is split, each moment is one all-reduce of
    one number per token. Group norm also averages over all dims between the first and the last,
    such as `height` and `width`: if these are split, a moment is an all-reduce of one number per
    example and group. If the channels are split, so are the groups.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines `input_dim`, `dim`, `kind`, `num_groups`, `epsilon` and `direct_scale`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define(
            "dim",
            "embed",
            "Another name for `embed`. Inputs then have named dims, or are images as for "
            "`Convolution`; it is the last dim of the result.",
        )
        p.Define(
            "kind",
            "layer",
            "'layer' takes the mean off, divides by the deviation, and adds a bias; 'rms' divides "
            "by the root of the mean square; 'group' is 'layer' over a group of channels and all "
            "places.",
        )
        p.Define("num_groups", 1, "Number of groups, of kind 'group'.")
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
        check_whole(p.name, "num_groups", p.num_groups, 1)
        if p.num_groups > 1 and p.kind != "group":
            raise PipelineError(
                f"{p.name}: kind is {p.kind!r} and num_groups={p.num_groups}, which is for kind "
                "'group' alone; leave num_groups unset, or set kind='group'"
            )
        if p.input_dim % p.num_groups:
            raise PipelineError(
                f"{p.name}: num_groups={p.num_groups} does not divide input_dim={p.input_dim}; "
                "give a divisor"
            )
        check_above_zero(p.name, "epsilon", p.epsilon)
        check_flags(p, ["direct_scale"])

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `scale`, and `bias` for layer norm."""
        zero, embed = py_utils.WeightInit.Constant(0.0), f"{p.dim}:{p.input_dim}"
        scale = py_utils.WeightInit.Constant(1.0) if p.direct_scale else zero
        bias = {"bias": (embed, zero)} if p.kind != "rms" else {}
        return {"scale": (embed, scale), **bias}

    @property
    def takes_slices(self) -> bool:
        """True unless it averages over positions, as group norm does."""
        return self.params.kind != "group"

    def FProp(self, theta: Any, x: Any) -> Tensor:
        """Normalizes `batch;length;embed`, or other dims; `dim` is the last one of the result."""
        p = self.params
        x = self.Named(x, _dims(p, x))
        names = [name for name in self.NamedWeights(p) if name not in self.untrained]
        weights = [self.Weight(theta, name) for name in names]
        over = self.Averaged(p, x.shape)
        if over == [p.dim] and x.layout.axes[-1] is None:
            axes = union_axes([x, *weights])
            operands = [tensor.vary(axes) for tensor in (x, *weights)]
            with operation("norm", [x, *weights]):
                slices = x.lowering.map(self._WholeVectors, *operands)
            return Tensor(x.lowering, slices, x.shape)
        shape = x.shape
        if p.kind == "group":
            x, *weights = [ops.reshape(t, _grouped(p, t.shape)) for t in (x, *weights)]
        centered, square = self._Moments(theta, ops.cast(x, tf.float32), over)
        y = self._Normalized(x, centered, square, weights)
        return ops.reshape(y, shape) if p.kind == "group" else y

    @classmethod
    def Averaged(cls, p: Any, shape: Shape) -> list[str]:
        """Returns the dims that moments are averaged over."""
        return [*shape.names[1:-1], _OF_GROUP] if p.kind == "group" else [p.dim]

    def _Moments(self, theta: Any, x: Tensor, over: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Returns the input without its mean over dims, and the mean square of that."""
        del theta
        centered = x - ops.reduce_mean(x, over) if self.params.kind != "rms" else x
        return centered, ops.reduce_mean(ops.square(centered), over)

    def _Normalized(
        self, x: Tensor, centered: Tensor, square: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        p = self.params

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
        x = tally.given(x, _dims(p, x), py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        weights = [weights[name] for name in weights if name not in cls.untrained]
        over = cls.Averaged(p, x.shape)
        if over == [p.dim] and tally.lowering.rules.axis(p.dim) is None:
            moment = tally.reduce(x, p.dim)
            tally.elementwise(x, *weights)
            tally.keep(tally.made(x.shape, x, tf.float32), tally.made(moment.shape, x, tf.float32))
            return tally.made(x.shape, x)
        shape = x.shape
        if p.kind == "group":
            x, *weights = [tally.made(_grouped(p, value.shape), value) for value in (x, *weights)]
        centered = x if x.dtype == tf.float32 else tally.made(x.shape, x, tf.float32)
        if p.kind != "rms":
            mean = tally.reduce(centered, over)
            tally.elementwise(centered, mean)
            centered = tally.made(x.shape, centered)
        moment = tally.reduce(centered, over)
        axes = tally.elementwise(centered, moment, *weights)
        tally.keep(centered, moment)
        # The normalized values, for the gradient of the scale.
        tally.keep(tally.made(x.shape, centered), axes=axes)
        return tally.made(shape, x)


def _dims(p: Any, x: Any) -> Any:
    """Returns the names of the dims of an input, or of its sizes."""
    if p.dim == "embed":
        return "batch;length;embed"
    if isinstance(x, Tensor | Value) and not is_unnamed(x.shape):
        return (*x.shape.without(p.dim).names, p.dim)
    sizes = x.ToTensorShape() if isinstance(x, tshape.Shape) else x.shape
    return ("batch", *SPACE.get(len(sizes) - 2, ()), p.dim)


def _grouped(p: Any, shape: Shape) -> Shape:
    """Returns a shape with the channels in groups; a split of the channels is one of the groups."""
    groups = Dim(p.dim, p.num_groups), Dim(_OF_GROUP, p.input_dim // p.num_groups)
    return Shape((*shape.without(p.dim).dims, *groups))


def merged_moments(a: Sequence[tf.Tensor], b: Sequence[tf.Tensor]) -> Sequence[tf.Tensor]:
    """Returns the moments of two sets of rows together.

    Moments are the number of rows, their mean, and the sum of squared differences from it.
    """
    # Sums of squares would lose a variance that is small beside the squared mean.
    rows = a[0] + b[0]
    share = b[0] / tf.maximum(rows, 1.0)
    difference = b[1] - a[1]
    squares = a[2] + b[2] + tf.square(difference) * a[0] * share
    return rows, a[1] + difference * share, squares


class BatchNorm(Norm):
    """Batch norm (Ioffe and Szegedy, 2015) over all dims but the last, the channels.

    In training moments are those of the batch, also where it is split. A layer in a pipeline sees a
    microbatch. Once a step the moving averages move towards the moments of the whole batch;
    evaluation uses these averages.
    """

    untrained = ("moving_mean", "moving_variance")

    @property
    def takes_slices(self) -> bool:
        """False: its moments are those of all positions."""
        return False

    @classmethod
    def Params(cls) -> Any:
        """Defines `decay`, beside the params of `Norm`, of kind 'layer'."""
        p = super().Params().Set(dim="channels", epsilon=1e-3)
        p.Define("decay", 0.99, "Share of a moving average that stays in a step.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_choice(p.name, "kind", p.kind, ("layer",))
        if not isinstance(p.decay, int | float) or not 0 <= p.decay <= 1:
            raise PipelineError(f"{p.name}: decay is {p.decay!r}; give a number from 0 to 1")

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `scale`, `bias`, and the moving averages."""
        moving = zip(cls.untrained, map(py_utils.WeightInit.Constant, (0.0, 1.0)), strict=True)
        channels = f"{p.dim}:{p.input_dim}"
        return super().NamedWeights(p) | {name: (channels, init) for name, init in moving}

    def _CreateLayerVariables(self) -> None:
        super()._CreateLayerVariables()
        for name, size in _MOMENTS.items():
            sizes = [self.params.input_dim] * size
            self.RegisterAccumulator(name, bn_layers.AddingAccumulator(sizes, tf.float32))

    @classmethod
    def Averaged(cls, p: Any, shape: Shape) -> list[str]:
        """Returns all dims but the channels."""
        return list(shape.without(p.dim).names)

    def _Moments(self, theta: Any, x: Tensor, over: Sequence[str]) -> tuple[Tensor, Tensor]:
        if self.do_eval:
            mean, variance = (ops.cast(self.Weight(theta, n), tf.float32) for n in self.untrained)
            return x - mean, variance
        number = float(x.shape.size // self.params.input_dim)
        mean = ops.reduce_mean(x, over)
        centered = x - mean
        variance = ops.reduce_mean(ops.square(centered), over)
        whole = [ops.export_tensor(ops.stop_gradient(t)) for t in (mean, variance)]
        earlier = [self.accumulators[name].GetValue() for name in _MOMENTS]
        merged = merged_moments(earlier, [tf.constant(number), whole[0], number * whole[1]])
        for name, value in zip(_MOMENTS, merged, strict=True):
            self.accumulators[name].SetValue(value)
        return centered, variance

    def PostTrainingStepUpdate(self) -> Any:
        """Updates the moving averages by the moments of all microbatches."""
        number, mean, squares = (self.accumulators[name].GetValue() for name in _MOMENTS)
        updates = []
        moments = mean, squares / tf.maximum(number, 1.0)
        for name, moment in zip(self.untrained, moments, strict=True):
            for part in self.parts_of(name):
                variable = self.vars[part.name]
                value = tf.cast(tf.slice(moment, part.begin, part.sizes), variable.dtype)
                # Without a batch the average stays.
                share = tf.cast((1 - self.params.decay) * tf.minimum(number, 1.0), variable.dtype)
                with tf.device(variable.device):
                    updates.append(variable.assign_sub((variable - value) * share))
        for name in _MOMENTS:
            self.accumulators[name].Reset()
        return tf.group(*updates)


class Dropout(NamedLayer):
    """Sets elements to zero, and scales the others up; in evaluation it does nothing.

    The mask is keyed by the global step and the layer, and every processor has its slice of one
    mask. So it does not depend on the layout, nor on the stages and microbatches of a pipeline.
    """

    takes_slices = True

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
