"""The layers of an encoder-decoder Transformer, each of which can be a stage.

The target travels along with the source, then the memory with the target:

    encoder: x, source segments, source positions, ids, labels, weights, segments, positions
    decoder: x, labels, weights, segments, positions, memory, source segments

Layers of the encoder, and of the decoder, change only the first; at first it is the source's ids.
The first layer of the decoder embeds the target's ids. So each stage of the decoder sends the
memory to the next one, and adds its gradient to that which it gets back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lingvo.core import hyperparams

from pipemesh.errors import PipelineError
from pipemesh.layers.check_params import check_whole
from pipemesh.layers.named.cache import continues
from pipemesh.layers.named.feed_forward import Experts
from pipemesh.layers.named.named_layer import NamedLayer
from pipemesh.layers.named.norm_and_dropout import Norm
from pipemesh.layers.named.tally import Tally
from pipemesh.layers.named.transformer_block import TransformerBlock
from pipemesh.layers.named.vocabulary import Embedding, SoftmaxCrossEntropy
from pipemesh.lowering import ops

_AS_MEMORY = {"length": "memory_length"}


class _Travelling(NamedLayer):
    """Takes some of the values after the first, and passes all of them on."""

    # The indices of those that `FProp` of the layer takes, in order.
    takes: Sequence[int | None] = ()

    @classmethod
    def _Taken(cls, rest: Sequence[Any]) -> list[Any]:
        return [None if i is None else rest[i] for i in cls.takes]

    def FProp(self, theta: Any, x: Any, *rest: Any) -> tuple[Any, ...]:
        """Changes the first value."""
        return super().FProp(theta, x, *self._Taken(rest)), *rest

    @classmethod
    def FPropMeta(cls, p: Any, x: Any, *rest: Any) -> Any:
        """Returns the cost of the layer, with the shapes of all values."""
        meta = super().FPropMeta(p, x, *cls._Taken(rest))
        meta.out_shapes = (meta.out_shapes[0], *rest)
        return meta


class _OfEncoder(_Travelling):
    """Passes all values on if the decoder continues: its cache has what it needs of the source."""

    def FProp(self, theta: Any, x: Any, *rest: Any) -> tuple[Any, ...]:
        """Changes the first value when the source is read."""
        return (x, *rest) if continues() else super().FProp(theta, x, *rest)


class EncoderEmbedding(_OfEncoder, Embedding):
    """Embeds the source."""

    takes = (1,)


class EncoderBlock(_OfEncoder, TransformerBlock):
    """Changes the source."""

    takes = (0, 1)


class DecoderBlock(_Travelling, TransformerBlock):
    """Changes the target, which sees the memory."""

    takes = (2, 3, None, 4, 5)


class DecoderEmbedding(Embedding):
    """Embeds the target, and normalizes the source, which is the memory from here on."""

    @classmethod
    def Params(cls) -> Any:
        """Defines `norm_tpl`."""
        p = super().Params()
        p.Define("norm_tpl", Norm.Params(), "Of the norm of the memory.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.CreateChild("memory_norm", _norm_of(self.params, self.params.embedding_dim))

    def FProp(
        self, theta: Any, x: Any, source_segments: Any, source_positions: Any, *target: Any
    ) -> tuple[Any, ...]:
        """Returns the values of the decoder."""
        del source_positions
        ids, *rest = target
        memory = None
        if not continues():
            memory = self.memory_norm.FProp(theta.memory_norm, self.Named(x, "batch;length;embed"))
            memory = ops.rename(memory, _AS_MEMORY)
        return super().FProp(theta, ids, rest[-1]), *rest, memory, source_segments

    @classmethod
    def FPropMeta(cls, p: Any, x: Any, *rest: Any) -> Any:
        """Returns the cost of the layer, with the shapes of the decoder's values."""
        source_segments, _, ids, *target = rest
        meta = super().FPropMeta(p, ids, target[-1], x)
        meta.out_shapes = (meta.out_shapes[0], *target, x, source_segments)
        return meta

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, ids: Any, positions: Any, x: Any) -> Any:
        """Counts the embedding and the norm."""
        memory = cls.CountPart(p, _norm_of(p, p.embedding_dim), tally, x)
        tally.rename(memory, _AS_MEMORY)
        return super().CountCosts(p, tally, ids, positions)


class DecoderSoftmax(SoftmaxCrossEntropy):
    """Computes the loss of the target."""

    def FProp(self, theta: Any, x: Any, labels: Any, weights: Any, *rest: Any) -> Any:
        """Returns loss, weight and the cross entropy of each label."""
        del rest
        return super().FProp(theta, x, labels, weights)

    @classmethod
    def CountCosts(cls, p: Any, tally: Tally, x: Any, *rest: Any) -> Any:
        """Counts the norm and the loss."""
        return super().CountCosts(p, tally, x, *rest[:2])


def _norm_of(p: Any, width: int) -> Any:
    return p.norm_tpl.Copy().Set(input_dim=width)


def encoder_decoder_layers(
    embedding: Any,
    block: Any,
    softmax: Any,
    num_encoder_layers: int,
    num_decoder_layers: int,
    tied: bool = True,
) -> tuple[list[Any], dict[str, str]]:
    """Makes the layers of an encoder-decoder Transformer for `PartitionSequentialLayers`.

    The source is embedded, passes the blocks of the encoder, which see both sides, and is
    normalized. The target is embedded, passes the blocks of the decoder, which see their past and
    the source, and is normalized before the softmax. Source: Vaswani et al., "Attention Is All You
    Need", 2017; norms are in front as in Raffel et al., "T5", 2020.

    The inputs of the stack are `batch;length` each: of the source ids, segments and positions, then
    of the target ids (each label's predecessor), labels, weights, segments and positions. Tokens
    see the source of their own segment. Segments may be None, of source and target together, and so
    may positions. The results are those of `SoftmaxCrossEntropy`. Inside `cache_scope` the first
    call of rows reads the source; in later ones the three inputs of the source are None.

    Args:
        embedding: params of the source's `Embedding`; the target's has as many tokens as `softmax`.
        block: params of the `TransformerBlock`s. The attention to the source is that to the own
            tokens without distances, unless `cross_attention_tpl` is given.
        softmax: params of the `SoftmaxCrossEntropy`.
        num_encoder_layers: how many blocks the encoder has.
        num_decoder_layers: how many the decoder has.
        tied: whether both embeddings and the softmax have one table.

    Returns:
        Params of the layers, first to last, and the `tied_weights` of their stack.

    Raises:
        PipelineError: a number of layers is not positive; params are of a subclass; or blocks have
            experts, whose balance loss does not travel.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.layers import PartitionSequentialLayers, PipeliningLayer
        >>> from pipemesh.layers.named import Embedding, SoftmaxCrossEntropy, TransformerBlock
        >>> layers, tied = encoder_decoder_layers(
        ...     Embedding.Params().Set(vocab_size=11, positions="sinusoidal"),
        ...     TransformerBlock.Params().Set(input_dim=8, num_heads=2, hidden_dim=16),
        ...     SoftmaxCrossEntropy.Params().Set(vocab_size=11), 2, 2)
        >>> specs = [tf.TensorSpec([2, 5], tf.int32)] * 3 + [tf.TensorSpec([2, 7], tf.int32)] * 5
        >>> stages = PartitionSequentialLayers(layers, 3, *specs)
        >>> stack = PipeliningLayer.Params().Set(cell_tpl=stages, tied_weights=tied)
        >>> [len(stage.sub) for stage in stages], tied["cell_003.table"]
        ([3, 2, 2], 'cell_000.table')
    """
    for field, number in (
        ("num_encoder_layers", num_encoder_layers),
        ("num_decoder_layers", num_decoder_layers),
    ):
        check_whole("encoder_decoder_layers", field, number, 1)
    if issubclass(block.feed_forward_tpl.cls, Experts):
        raise PipelineError(
            "encoder_decoder_layers was given blocks with Experts, whose balance loss does not "
            "travel; set feed_forward_tpl=FeedForward.Params()"
        )
    width, norm = block.input_dim, {"norm_tpl": block.norm_tpl}
    encoder, decoder = _as(EncoderBlock, block), _as(DecoderBlock, block)
    encoder.Set(cross_attention_tpl=None).attention_tpl.causal = False
    decoder.attention_tpl.causal = True
    if decoder.cross_attention_tpl is None:
        none = {"window": None, "use_rotary": False, "rotary_dim": None, "relative_buckets": 0}
        decoder.cross_attention_tpl = decoder.attention_tpl.Copy().Set(**none)
    first = _as(EncoderEmbedding, embedding).Set(embedding_dim=width)
    second = _as(DecoderEmbedding, embedding).Set(embedding_dim=width, **norm)
    layers = [
        first,
        *(encoder.Copy() for _ in range(num_encoder_layers)),
        second.Set(vocab_size=softmax.vocab_size),
        *(decoder.Copy() for _ in range(num_decoder_layers)),
        _as(DecoderSoftmax, softmax).Set(input_dim=width, **norm),
    ]
    if not tied:
        return layers, {}
    targets = f"cell_{num_encoder_layers + 1:03d}.table", f"cell_{len(layers) - 1:03d}.w"
    return layers, dict.fromkeys(targets, "cell_000.table")


def _as(cls: Any, params: Any) -> Any:
    """Returns params of a class with the values of those of its base."""
    base = cls.__bases__[-1]
    if params.cls is not base:
        raise PipelineError(
            f"encoder_decoder_layers was given params of {params.cls.__name__}, whose methods its "
            f"{cls.__name__} would lack; give params of {base.__name__}"
        )
    return hyperparams.CopyFieldsTo(params, cls.Params())
