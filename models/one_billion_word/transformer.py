"""The layers of a decoder-only Transformer, each of which can be a stage.

All have the same five inputs and outputs, of which only the first changes:

    hidden          [batch, time, model_dim] float; the embedding takes ids [batch, time] int32
    labels          [batch, time] int32
    weights         [batch, time] float32, 0 where there is nothing to predict
    segment_ids     [batch, time] int32; attention never crosses from one id to another
    segment_pos     [batch, time] int32, positions within the segment

The last layer returns the summed loss and the summed weight, two float32 scalars, and the cross
entropy of every label, [batch, time] float32.
"""

from __future__ import annotations

import math
from typing import Any

import tensorflow as tf
from lingvo.core import (
    base_layer,
    batch_major_attention,
    layers,
    layers_with_attention,
    py_utils,
    tshape,
)


def _meta(flops: float, hidden: Any, rest: tuple[Any, ...]) -> Any:
    return py_utils.NestedMap(flops=flops, out_shapes=(hidden, *rest))


def _tokens(shape: Any) -> int:
    return shape[0] * shape[1]


class Embedding(base_layer.BaseLayer):
    """A token embedding plus sinusoidal positions within the segment, then dropout.

    The positions are from Vaswani et al., "Attention Is All You Need", 2017, section 3.5.
    """

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("vocab_size", 0, "Number of tokens.")
        p.Define("model_dim", 0, "Size of a token's vector; even.")
        p.Define("dropout_prob", 0.0, "Dropout rate of the sum.")
        return p

    def __init__(self, params):
        super().__init__(params)
        p = self.params
        self.CreateChild("dropout", layers.DropoutLayer.Params().Set(keep_prob=1 - p.dropout_prob))

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        p = self.params
        init = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.model_dim))
        self.CreateVariable(
            "table", py_utils.WeightParams([p.vocab_size, p.model_dim], init, p.dtype)
        )

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos):
        p = self.params
        table = self._CastToFPropDtype(theta.table)
        hidden = tf.gather(table, ids) * math.sqrt(p.model_dim)
        hidden += tf.cast(sinusoids(segment_pos, p.model_dim), hidden.dtype)
        hidden = self.dropout.FProp(theta.dropout, hidden)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, ids, *rest):
        hidden = tshape.Shape([ids[0], ids[1], p.model_dim])
        return _meta(_tokens(ids) * p.model_dim * 4, hidden, rest)


def sinusoids(positions: tf.Tensor, dim: int) -> tf.Tensor:
    """Returns sine and cosine of positions at `dim / 2` wavelengths from 2 pi to 20,000 pi.

    The result is [..., dim] float32, `dim` is even.
    """
    steps = tf.range(dim // 2, dtype=tf.float32) / max(dim // 2 - 1, 1)
    column = tf.cast(positions, tf.float32)[..., None]  # pyright: ignore[reportArgumentType]
    angles = column * tf.exp(-math.log(1e4) * steps)
    return tf.concat([tf.sin(angles), tf.cos(angles)], axis=-1)


class Block(base_layer.BaseLayer):
    """Causal self-attention within segments, then a feed-forward layer; both residual."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("model_dim", 0, "Size of a token's vector.")
        p.Define("hidden_dim", 0, "Size of the feed-forward layer's hidden vector.")
        p.Define("num_heads", 1, "Number of attention heads; divides model_dim.")
        p.Define("dropout_prob", 0.0, "Dropout rate of attention, activations and residuals.")
        return p

    def __init__(self, params):
        super().__init__(params)
        p = self.params
        attention = batch_major_attention.TransformerAttentionLayer.Params().Set(
            input_dim=p.model_dim,
            num_heads=p.num_heads,
            is_masked=True,
            atten_dropout_prob=p.dropout_prob,
            residual_dropout_prob=p.dropout_prob,
        )
        # Without `packed_input` the layer accepts a segment mask but ignores it.
        attention.atten_tpl.packed_input = True
        # The default per-dim scale is for another kind of model.
        attention.atten_tpl.enable_per_dim_scale = False
        self.CreateChild("attention", attention)
        feed_forward = layers_with_attention.TransformerFeedForwardLayer.Params().Set(
            input_dim=p.model_dim,
            hidden_dim=p.hidden_dim,
            relu_dropout_prob=p.dropout_prob,
            residual_dropout_prob=p.dropout_prob,
        )
        self.CreateChild("feed_forward", feed_forward)

    def FProp(self, theta, hidden, labels, weights, segment_ids, segment_pos):
        hidden, _ = self.attention.FProp(
            theta.attention,
            hidden,
            None,
            tf.zeros_like(segment_ids, hidden.dtype),
            segment_mask=causal_segment_mask(segment_ids, hidden.dtype),
        )
        hidden = self.feed_forward.FProp(theta.feed_forward, hidden, None)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, hidden, *rest):
        projections = 4 * p.model_dim**2 + 2 * p.model_dim * p.hidden_dim
        attention = 2 * hidden[1] * p.model_dim
        return _meta(2 * _tokens(hidden) * (projections + attention), hidden, rest)


def causal_segment_mask(segment_ids: tf.Tensor, dtype: tf.DType) -> tf.Tensor:
    """Returns the term added to attention logits so that tokens see only their segment's past.

    It is [batch, 1, time, time]: 0 for visible positions, and elsewhere so low that the weight is
    exactly 0.
    """
    time = segment_ids.shape[1]
    # `==` would compare objects in a TF1 graph.
    same_segment = tf.equal(segment_ids[:, :, None], segment_ids[:, None, :])
    past = tf.range(time)[:, None] >= tf.range(time)[None, :]
    lowest = tf.constant(0.7 * dtype.min, dtype)
    return tf.where(same_segment & past, tf.zeros([], dtype), lowest)[:, None]


class Softmax(base_layer.BaseLayer):
    """Layer norm, logits, and the cross entropy of the labels: the head of a pipeline."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("vocab_size", 0, "Number of tokens.")
        p.Define("model_dim", 0, "Size of a token's vector.")
        return p

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("norm", layers.LayerNorm.Params().Set(input_dim=self.params.model_dim))

    def _CreateLayerVariables(self):
        super()._CreateLayerVariables()
        p = self.params
        init = py_utils.WeightInit.Gaussian(1 / math.sqrt(p.model_dim))
        self.CreateVariable(
            "projection", py_utils.WeightParams([p.model_dim, p.vocab_size], init, p.dtype)
        )
        zeros = py_utils.WeightInit.Constant(0.0)
        self.CreateVariable("bias", py_utils.WeightParams([p.vocab_size], zeros, p.dtype))

    def FProp(self, theta, hidden, labels, weights, segment_ids, segment_pos):
        del segment_ids, segment_pos
        hidden = self.norm.FProp(theta.norm, hidden)
        projection, bias = self._CastToFPropDtype((theta.projection, theta.bias))
        logits = tf.einsum("btd,dv->btv", hidden, projection) + bias
        xent = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, tf.cast(logits, tf.float32))
        weights = tf.cast(weights, tf.float32)
        return tf.reduce_sum(xent * weights), tf.reduce_sum(weights), xent

    @classmethod
    def FPropMeta(cls, p, hidden, *rest):
        flops = _tokens(hidden) * p.vocab_size * (2 * p.model_dim + 5)
        scalar = tshape.Shape([])
        return _meta(flops, scalar, (scalar, tshape.Shape([hidden[0], hidden[1]])))
