"""Activations that are split along `length` over the axis that weights are split over.

Between the products of matrices a tensor parallel model computes the same on all processors of the
axis. With the rule `length:model` beside `heads:model;d_ff:model;vocab:model` each computes a part
of the tokens there: in front of the products all tokens are gathered, behind them sums end in a
reduce-scatter, and both together send what the all-reduce would (Korthikanti et al., "Reducing
Activation Recomputation in Large Transformer Models", 2022, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from pipemesh.layers.named.tally import Tally, Value
from pipemesh.lowering import Tensor, ops
from pipemesh.mesh import LayoutRules

# What `length` is called where each processor has all of it.
WHOLE = "tokens"


def whole_names(rules: LayoutRules, *dims: str) -> dict[str, str]:
    """New names of dims for a layer that needs all tokens on each processor.

    Args:
        rules: of the layout.
        *dims: of weights that the layer splits.

    Returns:
        A name for `length` if it is split over the axis of one of `dims`; nothing elsewhere.
    """
    axis = rules.axis("length")
    return {"length": WHOLE} if axis is not None and axis in map(rules.axis, dims) else {}


def split_names(names: Mapping[str, str]) -> dict[str, str]:
    """The names back."""
    return {new: old for old, new in names.items()}


def whole_dims(dims: str, names: Mapping[str, str]) -> str:
    """Dims as text, by their new names.

    Example:
        >>> whole_dims("batch;length", {"length": "tokens"})
        'batch;tokens'
    """
    return ";".join(names.get(name, name) for name in dims.split(";"))


def whole(
    layer: Any, x: Any, dims: str, names: Mapping[str, str], dtype: tf.DType | None = None
) -> Tensor:
    """An input with all tokens on each processor.

    Args:
        layer: whose input it is.
        x: a plain tensor, or one with named dims.
        dims: of the input.
        names: of `whole_names`.
        dtype: see `NamedLayer.Named`.
    """
    if isinstance(x, Tensor):
        named = layer.Named(x, dims, dtype)
        return ops.rename(named, names) if names else named
    return layer.Named(x, whole_dims(dims, names), dtype)


def count_whole(
    tally: Tally, x: Any, dims: str, dtype: tf.DType, names: Mapping[str, str]
) -> Value:
    """Counts the same; see `Tally.given`."""
    if isinstance(x, Value):
        return tally.rename(tally.given(x, dims, dtype), names)
    return tally.given(x, whole_dims(dims, names), dtype)
