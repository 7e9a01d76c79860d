"""The ends and the task of an encoder that predicts masked tokens (Devlin et al., "BERT", 2019)."""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers import named
from pipemesh.layers.named.feed_forward import ACTIVATIONS, count_activation
from pipemesh.layers.named.tally import Tally
from pipemesh.lowering import ops
from pipemesh.lowering.ops.elementwise import broadcast

from ..one_billion_word.named_transformer import NamedEmbedding, NamedSoftmax, handing_on
from ..one_billion_word.task import LanguageModel

_TRANSFORMED = {"transformed": "embed"}


class TypedEmbedding(NamedEmbedding):
    """The embedding of a pipeline whose tokens have types."""

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos, token_types):
        hidden = named.Embedding.FProp(self, theta, ids, segment_pos, token_types)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, ids, *rest):
        return handing_on(named.Embedding.FPropMeta.__func__(cls, p, ids, *rest[-2:]), rest[:-1])


class MaskedSoftmax(NamedSoftmax):
    """A matmul with a nonlinearity, a norm, logits, and the cross entropy of the labels."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("activation", "GELU", "Of the first matmul, one of those of `FeedForward`.")
        return p.Set(predicts=True)

    @classmethod
    def NamedWeights(cls, p: Any) -> dict[str, Any]:
        """Returns `w_transform` and `b_transform`, and the weights of the logits."""
        gaussian = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.input_dim))
        dim, zero = f"transformed:{p.input_dim}", py_utils.WeightInit.Constant(0.0)
        first = {
            "w_transform": (f"embed:{p.input_dim};{dim}", gaussian),
            "b_transform": (dim, zero),
        }
        return first | super().NamedWeights(p)

    @classmethod
    def Matrices(cls, p: Any) -> dict[str, tuple[str, str]]:
        """Returns the dims of inputs and of outputs of the first matmul."""
        return {"w_transform": ("embed", "transformed")}

    def FProp(self, theta, x, labels, weights, *tokens):
        x = self.Named(x, "batch;length;embed")
        operands = [x, self.Weight(theta, "w_transform")]
        x = ops.einsum(operands, "batch;length;transformed") + self.Weight(theta, "b_transform")
        x = broadcast(ACTIVATIONS[self.params.activation].function, [x])
        x = ops.rename(x, _TRANSFORMED)
        return super().FProp(theta, x, labels, weights, *tokens)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any, *rest: Any) -> Any:
        x = tally.given(x, "batch;length;embed", py_utils.FPropDtype(p))
        weights = cls.CountedWeights(p, tally)
        x = tally.einsum([x, weights["w_transform"]], "batch;length;transformed")
        x = count_activation(p.activation, tally, [x], [weights["b_transform"]])
        return super().CountCosts(p, tally, tally.rename(x, _TRANSFORMED), *rest)


class MaskedLanguageModel(LanguageModel):
    """A task whose loss is the mean cross entropy of masked tokens, which have weights.

    A batch is that of a `LanguageModel`; it may have `token_types`, [batch, time] int32, by default
    0.
    """

    INPUTS = (*LanguageModel.INPUTS, "token_types")
    OUTPUTS = (*LanguageModel.OUTPUTS, "predicted")

    def ComputePredictions(self, theta, input_batch):
        """Returns loss and cross entropy; in evaluation also `labels` and `predicted` [batch, time]
        int32, the true and the most likely tokens at masked places, and -1 at others.
        """
        batch = py_utils.NestedMap(input_batch)
        batch.setdefault("token_types", tf.zeros_like(batch.ids))
        found = super().ComputePredictions(theta, batch)
        if "predicted" in found:
            for name, tokens in (("labels", batch.labels), ("predicted", found.predicted)):
                found[name] = tf.where(batch.weights > 0, tokens, -1)
        return found
