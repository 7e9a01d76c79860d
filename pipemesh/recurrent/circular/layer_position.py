"""The position of a layer's call in stack and batch, and its random numbers."""

from __future__ import annotations

import contextlib
import dataclasses

import tensorflow as tf

from pipemesh.errors import PipelineError, ShapeError
from pipemesh.lowering.arguments import as_shape
from pipemesh.lowering.lowering import Lowering, Slices
from pipemesh.lowering.ops import random
from pipemesh.lowering.tensor import Tensor
from pipemesh.mesh import Dim, Shape
from pipemesh.randomness.draws import RawDraw, draw_block
from pipemesh.randomness.scope import scopes, slicewise

# Odd, so that the seeds of all layers differ; large, so that they do not collide with seeds that a
# caller counts up.
_LAYER_STRIDE = 0x5851F42D4C957F2D


def layer_seed(seed: tf.Tensor, layer: int | tf.Tensor) -> tf.Tensor:
    """Returns the seed of one of alike layers: of step and number of the draw, or its row."""
    seed = tf.cast(seed, tf.int64)
    if seed.shape.rank == 2:
        return tf.gather(seed, layer)
    step, draw = tf.unstack(seed)
    return tf.stack([step, draw + tf.cast(layer, tf.int64) * _LAYER_STRIDE])


@dataclasses.dataclass(frozen=True)
class LayerPosition:
    """The position of a call of a layer function in the stack and in the batch.

    Each processor has its own layer and microbatch. The methods draw the numbers that one device
    would draw for the whole batch in the same layer. So masks do not depend on the plan. Inside a
    layer function of a `SimdPipeline`, `ops.dropout`, `ops.random_uniform` and `ops.random_normal`
    do the same.

    Attributes:
        lowering: of the tensors.
        layer: the number of the layer in the stack: int32 scalars.
        microbatch: the number of the microbatch: int32 scalars.
        batch: the batch dim of the whole batch.
        microbatch_size: the size of the batch dim inside the layer.
    """

    lowering: Lowering
    layer: Slices
    microbatch: Slices
    batch: Dim
    microbatch_size: int

    def random_uniform(
        self, shape: Shape | str, *, seed: tf.Tensor, dtype: tf.DType = tf.float32
    ) -> Tensor:
        """Returns uniform numbers in [0, 1).

        They are this microbatch's rows of `tf.random.stateless_uniform` for the whole batch, with
        the seed `layer_seed(seed, layer)` and Philox.

        Args:
            shape: of the result; a batch dim must have the microbatch's size.
            seed: two integers.
            dtype: floating.

        Raises:
            ShapeError: the batch dim has another size.
            LayoutError: the layout rules cannot split the tensor.
        """
        return self._draw(shape, seed, dtype, tf.raw_ops.StatelessRandomUniformV2)

    def random_normal(
        self, shape: Shape | str, *, seed: tf.Tensor, dtype: tf.DType = tf.float32
    ) -> Tensor:
        """Returns normal numbers of mean 0 and deviation 1; otherwise like `random_uniform`."""
        return self._draw(shape, seed, dtype, tf.raw_ops.StatelessRandomNormalV2)

    def dropout(self, x: Tensor, *, rate: float, seed: tf.Tensor) -> Tensor:
        """Sets elements to zero with probability `rate`, and scales the others by 1 / (1 - rate).

        The mask has this microbatch's rows of the mask of `tf.nn.experimental.stateless_dropout`
        for the whole batch, with the seed `layer_seed(seed, layer)` and Philox.

        Args:
            x: floating numbers.
            rate: the probability of being dropped, in [0, 1), as in TensorFlow.
            seed: two integers.

        Raises:
            ShapeError: `rate` is outside of [0, 1).
        """
        with self.entered():
            return random.dropout(x, rate=rate, seed=seed)

    def entered(self) -> contextlib.AbstractContextManager[None]:
        """Makes random `ops` draw like the methods here; TensorFlow's draws are a LayoutError."""
        if scopes.stack and getattr(scopes.stack[-1].position, "num_microbatches", 1) > 1:
            raise PipelineError(
                "a SimdPipeline runs inside of a stage of another pipeline, which has microbatches "
                "of its own; give one of the two a single microbatch"
            )
        return slicewise(
            "is called inside of the layer function of a SimdPipeline, where it would draw the "
            "same numbers for every layer and every microbatch; draw with ops.dropout, "
            "ops.random_uniform or ops.random_normal, which know layer, microbatch and layout",
            self._draw,
        )

    def _draw(self, shape: Shape | str, seed: tf.Tensor, dtype: tf.DType, raw: RawDraw) -> Tensor:
        shape = as_shape(shape)
        name = self.batch.name
        if name in shape and shape[name].size != self.microbatch_size:
            raise ShapeError(
                f"random numbers of shape '{shape}' were asked for inside of a pipeline, where "
                f"dim {name!r} has the size {self.microbatch_size} of a microbatch"
            )
        raw_map, layout = self.lowering.raw_map, self.lowering.tensor_layout(shape)
        sizes = [self.batch.size if dim.name == name else dim.size for dim in shape]
        begins: list[Slices] = []
        for dim, whole, size, axis in zip(
            shape, sizes, layout.slice_shape, layout.axes, strict=True
        ):
            if axis is None:
                begin = raw_map(lambda: tf.constant(0))
            else:
                part = whole // self.lowering.mesh.size(axis)
                begin = raw_map(lambda at, part=part: at * part, self.lowering.coordinate(axis))
            if dim.name == name:
                # Each processor has its part of the batch, and of that its microbatches.
                begin = raw_map(
                    lambda first, microbatch, size=size: first + microbatch * size,
                    begin,
                    self.microbatch,
                )
            begins.append(begin)
        slices = raw_map(
            lambda layer, *begin: draw_block(
                raw, sizes, begin, layout.slice_shape, layer_seed(seed, layer), dtype
            ),
            self.layer,
            *begins,
        )
        return Tensor(self.lowering, slices, shape)
