"""All weights with named dims of a layer and its children, by path."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from lingvo.core import py_utils

from pipemesh.errors import PipelineError
from pipemesh.layers.named import NamedLayer
from pipemesh.lowering import Tensor
from pipemesh.mesh import Shape


def check_named(owner: str, layer: Any) -> None:
    """Checks that all weights of one of a stack's alike layers have named dims.

    Args:
        owner: name of the stack.
        layer: the layer.

    Raises:
        PipelineError: one has none.
    """
    named = layer.weight_parts() if isinstance(layer, NamedLayer) else {}
    for name in layer.vars:
        if name not in layer.children and name not in named:
            raise PipelineError(
                f"{owner}: weight {name!r} of {layer.path!r}, a {type(layer).__name__} in the "
                "alike layers, has no named dims, so lowering='simd' cannot stack it; make it by "
                "NamedWeights of a NamedLayer, or use lowering='placement'"
            )
    for _, child, _ in _children(layer, None):
        check_named(owner, child)


def named_shapes(layer: Any, path: str = "") -> dict[str, Shape]:
    """The shapes of the whole weights.

    Args:
        layer: the layer.
        path: what paths begin with.
    """
    own = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    found = {path + name: shape for name, shape in own.items()}
    for name, child, _ in _children(layer, None):
        found |= named_shapes(child, f"{path}{name}.")
    return found


def named_weights(layer: Any, theta: Any, path: str = "") -> dict[str, Tensor]:
    """The weights, under the current lowering.

    Args:
        layer: the layer.
        theta: its weights.
        path: what paths begin with.
    """
    own = layer.named_shapes if isinstance(layer, NamedLayer) else {}
    found = {path + name: layer.Weight(theta, name) for name in own}
    for name, child, weights in _children(layer, theta):
        found |= named_weights(child, weights, f"{path}{name}.")
    return found


def theta_of(layer: Any, weight: Callable[[str], Tensor], theta: Any, path: str = "") -> Any:
    """A layer's theta that is made of weights with named dims.

    Args:
        layer: the layer.
        weight: the weight at a path.
        theta: where weights without named dims are; None if there are none.
        path: what paths begin with.
    """
    if isinstance(layer, NamedLayer):
        found = py_utils.NestedMap({name: weight(path + name) for name in layer.named_shapes})
    else:
        own = {} if theta is None else theta
        found = py_utils.NestedMap({k: v for k, v in own.items() if k not in layer.children})
    parts = iter(
        [
            theta_of(child, weight, weights, f"{path}{name}.")
            for name, child, weights in _children(layer, theta)
        ]
    )
    for name, child in layer.children.items():
        is_list = isinstance(child, list | tuple)
        found[name] = [next(parts) for _ in child] if is_list else next(parts)
    return found


def _children(layer: Any, theta: Any) -> Iterator[tuple[str, Any, Any]]:
    """The children of a layer, those in lists too, with names and weights."""
    for name, child in layer.children.items():
        own = None if theta is None else theta[name]
        if not isinstance(child, list | tuple):
            yield name, child, own
            continue
        for number, part in enumerate(child):
            yield f"{name}[{number}]", part, None if own is None else own[number]
