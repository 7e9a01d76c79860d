"""The layers of the decoder-only Transformer with named dims, which a layout can split.

Their inputs and outputs are those of `transformer`. Rules may split the dims `heads`, `d_ff`,
`vocab`, and `experts` in a model with experts. A value that is equal on all devices of a stage is
sent once per device. In a model with experts the sum of their balance losses is passed on too,
[batch] float32.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from lingvo.core import tshape

from pipemesh.layers import named
from pipemesh.lowering import Tensor, ops


def handing_on(meta: Any, rest: tuple[Any, ...]) -> Any:
    """Returns the meta of a layer that also passes on its arguments after the first."""
    meta.out_shapes = (meta.out_shapes[0], *rest)
    return meta


class NamedEmbedding(named.Embedding):
    """The embedding of a pipeline; positions are those within the segment."""

    takes_slices = True

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos):
        hidden = super().FProp(theta, ids, segment_pos)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, ids, *rest):
        return handing_on(super().FPropMeta(p, ids), rest)


class ExpertsEmbedding(NamedEmbedding):
    """An embedding for a stack of `ExpertsBlock`s, which adds a balance loss of 0 to its outputs.

    All blocks therefore have the same inputs and outputs.
    """

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos):
        outputs = super().FProp(theta, ids, labels, weights, segment_ids, segment_pos)
        return *outputs, tf.zeros([outputs[0].shape["batch"].size])

    @classmethod
    def FPropMeta(cls, p, ids, *rest):
        return handing_on(super().FPropMeta(p, ids, *rest), (*rest, tshape.Shape([ids[0]])))


class NamedBlock(named.TransformerBlock):
    """Causal self-attention within segments, then a feed-forward layer; both residual."""

    takes_slices = True

    def FProp(self, theta, x, labels, weights, segment_ids, segment_pos):
        hidden = super().FProp(theta, x, segment_ids, segment_pos)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, x, *rest):
        # The arguments after labels and weights.
        return handing_on(super().FPropMeta(p, x, *rest[2:]), rest)


class ExpertsBlock(named.TransformerBlock):
    """Causal self-attention within segments, then one or two experts for each token; both
    residual.
    """

    def FProp(self, theta, x, labels, weights, segment_ids, segment_pos, before):
        # Padding must not use the capacity of experts.
        if isinstance(segment_ids, Tensor):
            paddings = ops.cast(ops.equal(segment_ids, 0), tf.float32)
        else:
            paddings = tf.cast(tf.equal(segment_ids, 0), tf.float32)
        hidden, balance = super().FProp(theta, x, segment_ids, segment_pos, paddings)
        balance = balance + self.Named(before, "batch", balance.dtype)
        return hidden, labels, weights, segment_ids, segment_pos, balance

    @classmethod
    def FPropMeta(cls, p, x, *rest):
        # Paddings have the shape of segments.
        tokens = (*rest[2:4], rest[2]) if len(rest) > 3 else ()
        return handing_on(super().FPropMeta(p, x, *tokens), (*rest[:4], tshape.Shape([x[0]])))


class NamedSoftmax(named.SoftmaxCrossEntropy):
    """A norm, logits, and the cross entropy of the labels: the head of a pipeline.

    The loss includes `balance_weight` times the experts' balance losses, for each token.
    """

    takes_slices = True

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("balance_weight", 0.0, "Weight of the experts' balance losses.")
        return p.Set(norm_tpl=named.Norm.Params())

    def FProp(self, theta, x, labels, weights, segment_ids, segment_pos, *balance):
        del segment_ids, segment_pos
        found = super().FProp(theta, x, labels, weights)
        if named.current_cache() is not None:
            return found
        loss, total, *others = found
        for each in balance:
            tokens = ops.reduce_sum(self.Named(weights, "batch;length", tf.float32), "length")
            balances = ops.reduce_sum(self.Named(each, "batch", tf.float32) * tokens)
            loss = loss + balances * self.params.balance_weight
        return loss, total, *others

    @classmethod
    def CountCosts(cls, p, tally, x, labels=None, weights=None, *rest):
        found = super().CountCosts(p, tally, x, labels, weights)
        for each in rest[2:]:
            # Balance losses times numbers of tokens.
            each = tally.given(each, "batch", found[2].dtype)
            tally.keep(each, tally.reduce(found[2], "length"))
            tally.reduce(each, "batch")
        return found


def named_layers_of(config: Any) -> list[Any]:
    """Returns the params of all layers of the stack, first to last."""
    block = (
        (ExpertsBlock if config.NUM_EXPERTS else NamedBlock)
        .Params()
        .Set(
            input_dim=config.MODEL_DIM,
            hidden_dim=config.HIDDEN_DIM,
            num_heads=config.NUM_HEADS,
            dropout_rate=config.DROPOUT_PROB,
        )
    )
    if config.NUM_EXPERTS:
        block.feed_forward_tpl = named.Experts.Params().Set(
            num_experts=config.NUM_EXPERTS,
            num_choices=config.EXPERT_CHOICES,
            capacity_factor=config.CAPACITY_FACTOR,
        )
    else:
        block.feed_forward_tpl.dropout_rate = config.DROPOUT_PROB
    first = ExpertsEmbedding if config.NUM_EXPERTS else NamedEmbedding
    embedding = first.Params().Set(
        vocab_size=config.VOCAB_SIZE,
        embedding_dim=config.MODEL_DIM,
        scale_sqrt_depth=True,
        positions="sinusoidal",
        dropout_rate=config.DROPOUT_PROB,
    )
    softmax = NamedSoftmax.Params().Set(
        vocab_size=config.VOCAB_SIZE,
        input_dim=config.MODEL_DIM,
        balance_weight=config.BALANCE_WEIGHT,
    )
    return [embedding, *(block.Copy() for _ in range(config.NUM_LAYERS)), softmax]


def tied_weights_of(config: Any) -> dict[str, str]:
    """Returns the weights that the last layer shares with the first, as `tied_weights` of a
    stack.
    """
    if not config.TIED_EMBEDDINGS:
        return {}
    return {f"cell_{config.NUM_LAYERS + 1:03d}.w": "cell_000.table"}
