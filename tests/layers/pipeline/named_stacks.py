"""Stacks of layers with named dims."""

import numpy as np
import tensorflow as tf
from lingvo.core import base_layer, layers, py_utils, tshape

from pipemesh.layers import PipeliningLayer
from pipemesh.layers.named import Embedding, FeedForward, NamedLayer, Norm, SoftmaxCrossEntropy
from pipemesh.lowering import ops
from tests.layers.stacks import stack_of

# Tokens that no axis divides: the last slice of a split vocabulary is padded.
VOCAB, WIDTH = 11, 4
RNG = np.random.default_rng(0)
X = RNG.normal(size=[8, 4, WIDTH]).astype(np.float32)
WEIGHTS = RNG.uniform(size=[8]).astype(np.float32)


class Residual(NamedLayer):
    """Adds what a feed-forward layer makes of the normalized input; hands the rest through."""

    takes_slices = True

    def __init__(self, params):
        super().__init__(params)
        self.CreateChild("norm", Norm.Params().Set(input_dim=WIDTH))
        feed = FeedForward.Params().Set(input_dim=WIDTH, hidden_dim=8, dropout_rate=0.3)
        self.CreateChild("feed_forward", feed.Set(activation="GELU"))

    def FProp(self, theta, x, *rest):
        x = self.Named(x, "batch;length;embed")
        y = self.feed_forward.FProp(theta.feed_forward, self.norm.FProp(theta.norm, x))
        return (x + y, *rest) if rest else x + y


class Plain(base_layer.BaseLayer):
    """A layer of lingvo between named ones."""

    def __init__(self, params):
        super().__init__(params)
        fc = layers.FCLayer.Params().Set(input_dim=WIDTH, output_dim=WIDTH, activation="TANH")
        self.CreateChild("fc", fc)

    def FProp(self, theta, x, *rest):
        assert isinstance(x, tf.Tensor)
        y = self.fc.FProp(theta.fc, x)
        return (y, *rest) if rest else y


class Squares(base_layer.BaseLayer):
    """The squares of each example, summed with its weight."""

    def FProp(self, theta, x, weights):
        each = tf.reduce_sum(x**2, axis=[1, 2])
        return tf.reduce_sum(each * weights), tf.reduce_sum(weights)


def residuals(bounds, head=False, fc=(), cls=PipeliningLayer, **kwargs):
    """A stack of `Residual` layers, plain ones at `fc`, and perhaps a head as the last layer."""
    sub = [
        Plain.Params().Set(name=f"fc_{i}") if i in fc else Residual.Params().Set(name=f"named_{i}")
        for i in range(bounds[-1] - head)
    ]
    if head:
        sub.append(Squares.Params().Set(name="head"))
    return stack_of(sub, bounds, cls, **{"num_micro_batches": 2, "loss_inside": head, **kwargs})


TIED = {"named_head.w": "named_embedding.table"}
INPUTS = [
    *(RNG.integers(0, VOCAB, [8, 6]).astype(np.int32) for _ in range(2)),
    RNG.uniform(size=[8, 6]).astype(np.float32),
    None,
]


def counts(cls, of_token, more=lambda p, x: 0):
    """Gives a layer costs: flops of each token, and more by its params and inputs."""

    def meta(p, x, *rest):
        shape = x if x.rank == 3 else tshape.Shape([x[0], x[1], WIDTH])
        flops = of_token * int(shape[0]) * int(shape[1]) + more(p, shape)
        return py_utils.NestedMap(flops=flops, out_shapes=(shape, *rest))

    cls.FPropMeta = meta
    return cls


class Embed(Embedding):
    takes_slices = True

    def FProp(self, theta, ids, labels, weights, nothing):
        return super().FProp(theta, ids), labels, weights, nothing


class Masked(Residual):
    """Reads what goes along, and what travels though no layer changes it."""

    takes_slices = True

    def FProp(self, theta, x, labels, weights, nothing):
        y = super().FProp(theta, x)
        odd = ops.cast(ops.equal(self.Named(labels, "batch;length"), 3), y.dtype)
        y = y + odd * 0.1 + self.Named(weights, "batch;length") * 0.1
        return y, labels, weights, nothing


class Head(SoftmaxCrossEntropy):
    takes_slices = True

    def FProp(self, theta, x, labels, weights, nothing):
        assert nothing is None
        return super().FProp(theta, x, labels, weights)


counts(Embed, 0)
counts(Masked, 2 * 2 * WIDTH * 8)
counts(Head, 2 * WIDTH * VOCAB)


def language_layers(number=4, block=None):
    """An embedding, alike blocks and a head."""
    block = block or Masked.Params()
    embed = Embed.Params().Set(name="named_embedding", embedding_dim=WIDTH, dropout_rate=0.2)
    head = Head.Params().Set(name="named_head", input_dim=WIDTH)
    blocks = [block.Copy().Set(name=f"named_block{i}") for i in range(number)]
    return [embed.Set(vocab_size=VOCAB), *blocks, head.Set(vocab_size=VOCAB)]


def language(bounds, cls=PipeliningLayer, layers=None, tied=None, **kwargs):
    """A stack of language layers with the loss inside; its lowering is `simd` by default."""
    layers = layers or language_layers(bounds[-1] - 2)
    options = {"loss_inside": True, "lowering": "simd", "num_micro_batches": 2, **kwargs}
    return stack_of(layers, bounds, cls, tied, **options)
