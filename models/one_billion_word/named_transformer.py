"""The layers of the decoder-only Transformer with named dims, which a layout splits.

They take and return what those of `transformer` do. The dims that rules may split are `heads`,
`d_ff` and `vocab`. What is the same on all devices of a stage goes on once for each.
"""

from __future__ import annotations

from typing import Any

from pipemesh.layers import named


def _handing_on(meta: Any, rest: tuple[Any, ...]) -> Any:
    """What a layer says of itself that hands on what comes after its first argument."""
    meta.out_shapes += rest
    return meta


class NamedEmbedding(named.Embedding):
    """Token embedding plus sinusoidal positions within the segment, then dropout."""

    def FProp(self, theta, ids, labels, weights, segment_ids, segment_pos):
        hidden = super().FProp(theta, ids, segment_pos)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, ids, *rest):
        return _handing_on(super().FPropMeta(p, ids), rest)


class NamedBlock(named.TransformerBlock):
    """Causal self-attention within segments, then a feed-forward layer; both residual."""

    def FProp(self, theta, x, labels, weights, segment_ids, segment_pos):
        hidden = super().FProp(theta, x, segment_ids, segment_pos)
        return hidden, labels, weights, segment_ids, segment_pos

    @classmethod
    def FPropMeta(cls, p, x, *rest):
        return _handing_on(super().FPropMeta(p, x), rest)


class NamedSoftmax(named.SoftmaxCrossEntropy):
    """Layer norm, logits, and the cross entropy of the labels: the head of a pipeline."""

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("norm", named.Norm.Params().Set(input_dim=self.params.input_dim))

    def FProp(self, theta, x, labels, weights, segment_ids, segment_pos):
        del segment_ids, segment_pos
        return super().FProp(theta, self.norm.FProp(theta.norm, x), labels, weights)


def named_layers_of(config: Any) -> list[Any]:
    """Params of all layers of the stack, first to last."""
    block = NamedBlock.Params().Set(
        input_dim=config.MODEL_DIM,
        hidden_dim=config.HIDDEN_DIM,
        num_heads=config.NUM_HEADS,
        dropout_rate=config.DROPOUT_PROB,
    )
    block.feed_forward_tpl.dropout_rate = config.DROPOUT_PROB
    embedding = NamedEmbedding.Params().Set(
        vocab_size=config.VOCAB_SIZE,
        embedding_dim=config.MODEL_DIM,
        scale_sqrt_depth=True,
        positions="sinusoidal",
        dropout_rate=config.DROPOUT_PROB,
    )
    softmax = NamedSoftmax.Params().Set(vocab_size=config.VOCAB_SIZE, input_dim=config.MODEL_DIM)
    return [embedding, *(block.Copy() for _ in range(config.NUM_LAYERS)), softmax]
