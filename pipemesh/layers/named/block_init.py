"""Initial values of named weights: the same whole tensor under every layout."""

from __future__ import annotations

import dataclasses
from typing import Any

import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.lowering.variable import Constant, Initializer, Normal, Uniform
from pipemesh.text import nearest_text

_METHODS = ("constant", "gaussian", "uniform")


def initializer_of(init: Any, name: str, random_seed: int | None) -> Initializer:
    """Returns an initializer that makes any block of a weight's initial value.

    Numbers are keyed by the weight's full logical name and a seed, as in lingvo's stateless
    initializers. So two weights differ, and a run can be repeated. A seed in `init` replaces
    `random_seed`.

    Raises:
        PipelineError: `init` is not a `Constant`, `Gaussian` or `Uniform` of `py_utils.WeightInit`.

    Example:
        >>> from lingvo.core import py_utils
        >>> initializer_of(py_utils.WeightInit.Gaussian(0.1), "model/w", None).stddev
        0.1
    """
    method = getattr(init, "method", None)
    if method not in _METHODS:
        given = repr(init) if method is None else repr(method)
        raise PipelineError(
            f"weight {name!r}: init is {given}{nearest_text(str(method), _METHODS)}; a named "
            "weight is drawn slice by slice, so write py_utils.WeightInit.Gaussian(stddev), "
            "Uniform(limit) or Constant(value)"
        )
    if method == "constant":
        return Constant(init.scale)
    first = random_seed if init.seed is None else init.seed
    seed = int(first or 0), int(py_utils.GenerateSeedFromName(name))
    if method == "gaussian":
        return Normal(init.scale, seed)
    return Uniform(-init.scale, init.scale, seed)


@dataclasses.dataclass(frozen=True)
class BlockInit:
    """A TensorFlow initializer that makes one block.

    Attributes:
        initializer: makes any block.
        sizes: the sizes of the whole weight.
        begin: the start of the block.
    """

    initializer: Initializer
    sizes: tuple[int, ...]
    begin: tuple[int, ...]

    def __call__(
        self, shape: Any, dtype: Any = tf.float32, partition_info: Any = None
    ) -> tf.Tensor:
        """Makes the block of a shape."""
        del partition_info
        block = static_sizes(tf.TensorSpec(shape))
        return self.initializer(self.sizes, self.begin, block, tf.as_dtype(dtype))
