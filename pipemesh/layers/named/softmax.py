"""Cross entropy of labels."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_flags, check_whole
from pipemesh.layers.named.cache import current_cache
from pipemesh.layers.named.named_layer import (
    NamedLayer,
    count_whole,
    split_names,
    whole,
    whole_dims,
    whole_names,
)
from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.ops.einsum import products
from pipemesh.mesh import Dim, Shape


class SoftmaxCrossEntropy(NamedLayer):
    """Logits of all tokens, and the cross entropy of the labels: the head of a language model.

    With the rule `vocab:model` each processor has the logits of some tokens only. All-reduces
    combine their maximum, the sum of exponentials, and the label's logit: one number per token
    each.
    """

    @classmethod
    def Params(cls) -> Any:
        """Defines sizes, `use_bias` and `label_smoothing`."""
        p = super().Params()
        p.Define("input_dim", 0, "Size of `embed`.")
        p.Define("vocab_size", 0, "Size of `vocab`.")
        p.Define("use_bias", True, "Whether a bias is added to the logits.")
        p.Define(
            "label_smoothing",
            0.0,
            "Part of each label's probability that all tokens share; 0 or more, less than 1.",
        )
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        check_whole(p.name, "input_dim", p.input_dim, 1)
        check_whole(p.name, "vocab_size", p.vocab_size, 1)
        check_flags(p, ["use_bias"])
        if not isinstance(p.label_smoothing, int | float) or not 0 <= p.label_smoothing < 1:
            raise PipelineError(
                f"{p.name}: label_smoothing is {p.label_smoothing!r}; it is a number from 0 on and "
                "below 1"
            )

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w`, and `b` with `use_bias`."""
        vocab = f"vocab:{p.vocab_size}"
        init = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        weights = {"w": (f"embed:{p.input_dim};{vocab}", init)}
        return weights | ({"b": (vocab, py_utils.WeightInit.Constant(0.0))} if p.use_bias else {})

    def Logits(self, theta: Any, x: Any) -> Tensor:
        """Returns `batch;length;vocab` in float32, for `batch;length;embed`.

        If one axis splits `length` and `vocab`, each processor has all tokens, and their dim is
        `tokens`.
        """
        p = self.params
        x = self.Named(x, "batch;length;embed")
        names = whole_names(x.lowering.rules, "vocab")
        dims = ["batch", names.get("length", "length"), "vocab"]
        (logits,) = products(x, [self.Weight(theta, "w")], [dims], names)
        if p.use_bias:
            logits = logits + self.Weight(theta, "b")
        return ops.cast(logits, tf.float32)

    def FProp(self, theta: Any, x: Any, labels: Any, weights: Any = None) -> Any:
        """Computes the loss.

        Args:
            theta: weights of the layer.
            x: `batch;length;embed`.
            labels: `batch;length`, integers below `vocab_size`.
            weights: `batch;length`, weights of the labels; 1 by default.

        Returns:
            The weighted sum of cross entropies, the sum of the weights, and the cross entropy of
            each label, `batch;length`: all float32. Inside `cache_scope` labels are ignored, and
            the result is the logits of the next token in each row, `batch;vocab` float32.
        """
        p = self.params
        if (cache := current_cache()) is not None:
            return self._Next(theta, x, cache.last)
        logits = self.Logits(theta, x)
        names = whole_names(logits.lowering.rules, "vocab")
        labels = whole(self, labels, "batch;length", names)
        right = ops.gather(logits, labels, "vocab")
        if p.label_smoothing:
            mean = ops.reduce_mean(logits, "vocab")
            right = right * (1 - p.label_smoothing) + mean * p.label_smoothing
        xent = ops.reduce_logsumexp(logits, "vocab") - right
        if weights is None:
            weights = tf.ones(xent.shape.sizes)
        # Stays float32, not the dtype of matmuls, because weights are also summed.
        weights = whole(self, weights, "batch;length", names, tf.float32)
        weights = ops.cast(weights, tf.float32)
        each = ops.rename(xent, split_names(names))
        return ops.reduce_sum(xent * weights), ops.reduce_sum(weights), each

    def _Next(self, theta: Any, x: Any, last: Any) -> Tensor:
        """Returns the logits of the token after `last` in each row, `batch;vocab`."""
        x = self.Named(x, "batch;length;embed")
        at = self.Named(last, "batch")
        x = ops.gather(x, at, "length")
        batch, embed = x.shape
        logits = self.Logits(theta, ops.reshape(x, Shape((batch, Dim("length", 1), embed))))
        return ops.reshape(logits, Shape((batch, logits.shape["vocab"])))

    @classmethod
    def CountCosts(
        cls, p: Any, tally: Tally, x: Any, labels: Any = None, weights: Any = None
    ) -> tuple[Value, Value, Value]:
        """Counts the logits, whose gradient reads exponentials and their sums."""
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        own = cls.CountedWeights(p, tally)
        names = whole_names(tally.lowering.rules, "vocab")
        rows = whole_dims("batch;length", names)
        (logits,) = tally.products(x, [own["w"]], [f"{rows};vocab"], names)
        if p.use_bias:
            tally.meet(logits, own["b"])
        logits = tally.made(logits.shape, logits, tf.float32)
        labels = x.shape.sizes[:2] if labels is None else labels
        labels = count_whole(tally, labels, "batch;length", tf.int32, names)
        if isinstance(weights, Value):
            count_whole(tally, weights, "batch;length", tf.float32, names)
        right = tally.gather(logits, labels, "vocab")
        if p.label_smoothing:
            tally.reduce(logits, "vocab")
        # The maximum, and the sum of exponentials.
        tally.keep(tally.made(logits.shape, logits), tally.reduce(logits, "vocab", times=2))
        xent = tally.made(right.shape, right)
        of_labels = tally.made(right.shape, right)
        tally.keep(*[] if weights is None else [xent, of_labels])
        scalar = tally.reduce(xent, rows, times=2)
        return scalar, tally.made(scalar.shape, scalar), tally.rename(xent, split_names(names))
