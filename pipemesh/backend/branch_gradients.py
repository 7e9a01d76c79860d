"""Gradients of gradients of a `tf.cond` whose branches use tensors of outer graphs."""

from __future__ import annotations

import types
from typing import Any

from tensorflow.python.ops import cond_v2

_original = cond_v2._resolve_grad_inputs


def _resolve(branch: Any, gradient: Any) -> list[Any]:
    """Finds what the gradient of a branch takes.

    TensorFlow's function raises an `AssertionError` for a tensor of a graph further out, such as
    an argument of the program of a core. It is captured here; all others are left to TensorFlow.
    """
    outer, found = gradient.outer_graph, []
    for tensor in gradient.external_captures:
        if tensor.graph is not branch and _is_further_out(tensor.graph, outer):
            found.append(outer.capture(tensor))
        else:
            one = types.SimpleNamespace(external_captures=[tensor], outer_graph=outer)
            found += _original(branch, one)
    return found


def _is_further_out(graph: Any, inner: Any) -> bool:
    outer = getattr(inner, "outer_graph", None)
    return outer is not None and (graph is outer or _is_further_out(graph, outer))


def install_branch_gradients() -> None:
    """Makes second gradients of branches possible; nothing else changes."""
    cond_v2._resolve_grad_inputs = _resolve
