"""A U-Net (Ronneberger et al., 2015; of volumes Çiçek et al., 2016) on named dims."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import tensorflow as tf

from pipemesh.lowering import Tensor, ops
from pipemesh.lowering.variable import Constant, Normal
from pipemesh.mesh import Dim, Shape

from ..named_dims.trainer import Input, Weight
from .volumes import CLASSES

SPACE: tuple[str, ...] = ("depth", "rows", "cols")
_WINDOW = {name: f"window_{name}" for name in SPACE}
_HALF = {name: 2 for name in SPACE}
_EPSILON = 1e-3


class UNet:
    """A network of volumes `batch;depth;rows;cols` and the classes of their voxels.

    Each level halves the space and doubles the channels. On the way back, each level gets the
    result of its size from the way down: the skip. A normalization and ReLU follow convolutions.
    """

    def __init__(
        self, batch_size: int, side: int, num_channels: int, num_levels: int, seed: int
    ) -> None:
        volume = Shape((Dim("batch", batch_size), *(Dim(name, side) for name in SPACE)))
        self.inputs = (Input(volume, tf.float32), Input(volume, tf.int32))
        self._classes = Dim("classes", len(CLASSES))
        self._num_levels = num_levels
        self._seeds = zip(itertools.repeat(seed), itertools.count())
        self.weights = tuple(self._weights(num_channels))

    def _weights(self, channels: int) -> Iterator[Weight]:
        """Yields the weights in the order in which `forward` needs them."""
        yield from self._convolution("down0", 1, channels)
        for level in range(1, self._num_levels + 1):
            yield from self._convolution(f"down{level}", channels, 2 * channels)
            channels *= 2
        for level in reversed(range(self._num_levels)):
            channels //= 2
            yield self._filters(f"enlarge{level}", 2, 2 * channels, channels)
            yield from self._convolution(f"up{level}", 2 * channels, channels)
        logits = Shape((Dim("channels", channels), self._classes))
        yield Weight("logits", logits, Normal(channels**-0.5, next(self._seeds)))

    def _convolution(self, name: str, before: int, after: int) -> Iterator[Weight]:
        yield self._filters(name, 3, before, after)
        for part, value in (("scale", 1.0), ("bias", 0.0)):
            yield Weight(f"{name}_{part}", Shape((Dim("channels", after),)), Constant(value))

    def _filters(self, name: str, size: int, before: int, after: int) -> Weight:
        window = [Dim(dim, size) for dim in _WINDOW.values()]
        # The channel of volumes has a name of its own, since it cannot be split.
        channels = Dim("intensity" if name == "down0" else "channels", before)
        shape = Shape((*window, channels, Dim("features", after)))
        deviation = math.sqrt(2 / (size**3 * before))
        return Weight(name, shape, Normal(deviation, next(self._seeds)))

    def forward(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the mean cross entropy of all voxels in nats, and the logits."""
        volumes, classes = inputs
        rest = iter(weights)
        x = ops.reshape(volumes, Shape((*volumes.shape.dims, Dim("intensity", 1))))
        x = _convolved(x, rest)
        skips: list[Tensor] = []
        for _ in range(self._num_levels):
            skips.append(x)
            x = _convolved(ops.max_pool(x, _HALF, padding="VALID"), rest)
        for skip in reversed(skips):
            x = ops.conv_transpose(x, next(rest), _WINDOW, padding="SAME", strides=2)
            x = ops.rename(x, {"features": "channels"})
            x = _convolved(ops.concat([skip, x], "channels"), rest)
        logits = ops.einsum([x, next(rest)], [*volumes.shape.names, "classes"])
        right = ops.one_hot(classes, self._classes) * ops.log_softmax(logits, "classes")
        return -ops.reduce_mean(ops.reduce_sum(right, "classes")), logits


def _convolved(x: Tensor, weights: Iterator[Tensor]) -> Tensor:
    """Convolves, normalizes each channel of each volume, and applies ReLU."""
    x = ops.conv3d(x, next(weights), _WINDOW, padding="SAME")
    x = ops.rename(x, {"features": "channels"})
    x = x - ops.reduce_mean(x, SPACE)
    x = x * ops.rsqrt(ops.reduce_mean(ops.square(x), SPACE) + _EPSILON)
    return ops.relu(x * next(weights) + next(weights))
