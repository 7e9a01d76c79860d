"""A network of lingvo layers: convolutions with batch normalization, and logits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf
from lingvo.core import base_layer, bn_layers, layers, py_utils, tshape

from .data import NUM_CLASSES, SIDE


class NormedConvolution(base_layer.BaseLayer):
    """A convolution of 3 x 3, batch normalization and ReLU."""

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("channels", (0, 0), "Channels of the images that come in, and that go out.")
        p.Define("stride", 1, "Of the convolution, in both directions.")
        p.Define("norm", bn_layers.BatchNormLayerNoPadding.Params(), "The normalization.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        p = self.params
        self.CreateChild("conv", self._convolution(p))
        self.CreateChild("norm", p.norm.Copy().Set(dim=p.channels[1]))

    @staticmethod
    def _convolution(p: Any) -> Any:
        """Returns the params of the convolution."""
        return layers.Conv2DLayerNoPadding.Params().Set(
            filter_shape=(3, 3, *p.channels), filter_stride=(p.stride, p.stride)
        )

    def FProp(self, theta: Any, images: tf.Tensor) -> tf.Tensor:
        """Maps images [batch, height, width, channels] to images."""
        images = self.conv.FProp(theta.conv, images)
        return tf.nn.relu(self.norm.FProp(theta.norm, images))

    @classmethod
    def FPropMeta(cls, p: Any, images: Any) -> Any:
        meta = layers.Conv2DLayerNoPadding.FPropMeta(cls._convolution(p), images)
        norm = p.norm.cls.FPropMeta(p.norm, *meta.out_shapes)
        return py_utils.NestedMap(flops=meta.flops + norm.flops, out_shapes=meta.out_shapes)


class Logits(base_layer.BaseLayer):
    """A fully connected layer from all values of an image to the logits of the classes."""

    @classmethod
    def Params(cls) -> Any:
        p = super().Params()
        p.Define("input_dim", 0, "Values of an image.")
        return p

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.CreateChild("dense", self._dense(self.params))

    @staticmethod
    def _dense(p: Any) -> Any:
        """Returns the params of the fully connected layer."""
        return layers.FCLayer.Params().Set(
            input_dim=p.input_dim, output_dim=NUM_CLASSES, activation="NONE"
        )

    def FProp(self, theta: Any, images: tf.Tensor) -> tf.Tensor:
        """Maps images [batch, height, width, channels] to logits [batch, classes]."""
        values = tf.reshape(images, [images.shape[0], self.params.input_dim])
        return self.dense.FProp(theta.dense, values)

    @classmethod
    def FPropMeta(cls, p: Any, images: Any) -> Any:
        flat = tshape.Shape([images[0], p.input_dim])
        return layers.FCLayer.FPropMeta(cls._dense(p), flat)


def network(channels: Sequence[int], norm: Any) -> list[Any]:
    """Returns the params of all layers, first to last.

    All convolutions but the first halve height and width. A pipeline needs
    `BatchNormLayerNoPadding` as `norm`; other networks may use `BatchNormLayer`.
    """
    convolutions = [
        NormedConvolution.Params().Set(
            name=f"conv{i}",
            channels=(channels[i - 1] if i else 1, number),
            stride=2 if i else 1,
            norm=norm,
        )
        for i, number in enumerate(channels)
    ]
    side = SIDE
    for _ in channels[1:]:
        side = -(-side // 2)
    return [*convolutions, Logits.Params().Set(name="logits", input_dim=side**2 * channels[-1])]
