"""Activations that are split along `length` over the axis that splits weights.

Between matmuls a tensor-parallel model computes the same on all processors of the axis. With the
rule `length:model` beside `heads:model;d_ff:model;vocab:model` each computes some of the tokens
there. An all-gather before the matmuls and a reduce-scatter after them replace the all-reduce. Both
together send as much as it did (Korthikanti et al., "Reducing Activation Recomputation in Large
Transformer Models", 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.mesh import LayoutRules

# The name of `length` where each processor has all of it.
WHOLE = "tokens"


def whole_names(rules: LayoutRules, *dims: str) -> dict[str, str]:
    """Returns a new name for `length` if one of `dims` is split over its axis, else nothing."""
    axis = rules.axis("length")
    return {"length": WHOLE} if axis is not None and axis in map(rules.axis, dims) else {}


def split_names(names: Mapping[str, str]) -> dict[str, str]:
    """Inverts `whole_names`."""
    return {new: old for old, new in names.items()}


def whole_dims(dims: str, names: Mapping[str, str]) -> str:
    """Returns dims as text, with their new names.

    Example:
        >>> whole_dims("batch;length", {"length": "tokens"})
        'batch;tokens'
    """
    return ";".join(names.get(name, name) for name in dims.split(";"))


def whole(
    layer: Any, x: Any, dims: str, names: Mapping[str, str], dtype: tf.DType | None = None
) -> Tensor:
    """Returns an input, plain or with named dims, with all tokens on each processor."""
    if isinstance(x, Tensor):
        named = layer.Named(x, dims, dtype)
        return ops.rename(named, names) if names else named
    return layer.Named(x, whole_dims(dims, names), dtype)


def count_whole(
    tally: Tally, x: Any, dims: str, dtype: tf.DType, names: Mapping[str, str]
) -> Value:
    """Counts `whole`; see `Tally.given`."""
    if isinstance(x, Value):
        return tally.rename(tally.given(x, dims, dtype), names)
    return tally.given(x, whole_dims(dims, names), dtype)
