"""Nodes of a traced graph that compute the same, made one before parts of it are pasted.

TensorFlow's graph optimizer does so, too, but after pasting: in each copy of each part again, at a
cost that grows with the number of copies. Python traces a fresh constant wherever it meets a
number, so that of a layer's nodes every second or third is one that was there before.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.gradients import had_gradient, passes_on
from pipemesh.backend.graphs import Bodies
from pipemesh.backend.operation_kinds import LOOPS, has_effect, is_stateful

# They hand on what they are given; nothing asks for a gradient any more.
_HAND_ON = frozenset(("Identity", "StopGradient", "PreventGradient"))


def use_first(
    nodes: Sequence[tf.compat.v1.NodeDef],
    bodies: Bodies,
    layer_of: Mapping[str, str],
    kept: Container[str],
) -> None:
    """Lets nodes use the first of all nodes that compute the same; see the module.

    No node is removed: one that nothing uses any more is not pasted. Nodes of different layers,
    constants apart, stay different, since what is computed again is chosen by layer. So do nodes on
    different devices, and those that have state, check or tell something.

    Args:
        nodes: of one graph, each after those that it uses, without control dependencies; their
            inputs are changed.
        bodies: the functions that they call.
        layer_of: the layer of each node that belongs to one.
        kept: names of nodes that somebody asks for by name; they stay in use.
    """
    first: dict[Hashable, str] = {}
    # The node that stands for another, and the tensor that stands for one that is handed on.
    same: dict[str, str] = {}
    handed_on: dict[str, str] = {}
    passed_on: dict[str, list[str]] = {}
    known = {node.name: node for node in nodes}

    def resolved(source: str) -> str:
        name, _, index = source.partition(":")
        if name in passed_on:
            return passed_on[name][int(index or 0)]
        if name in handed_on:
            return handed_on[name]
        return source if name not in same else f"{same[name]}:{index}" if index else same[name]

    def lies_with(source: str, node: tf.compat.v1.NodeDef) -> bool:
        other = known[source.partition(":")[0]]
        return other.device == node.device and layer_of.get(other.name) == layer_of.get(node.name)

    for node in nodes:
        sources = [resolved(source) for source in node.input]
        if sources != list(node.input):
            del node.input[:]
            node.input.extend(sources)
        if passes_on(node):
            # It is there for the gradient, lies on one device, and its tensors on several. What is
            # asked for by its name is still there.
            passed_on[node.name] = sources
        elif had_gradient(node):
            passed_on[node.name] = [
                source if lies_with(source, node) else f"{node.name}:{i}"
                for i, source in enumerate(sources)
            ]
        elif node.op in LOOPS and tf.resource.as_datatype_enum in node.attr["T"].list.type:
            # A variable that a loop reads goes through it. It cannot be kept in a buffer.
            body, types = node.attr["body"].func.name, node.attr["T"].list.type
            passed_on[node.name] = [
                source
                if kind == tf.resource.as_datatype_enum and bodies.returns_argument(body, i)
                else f"{node.name}:{i}"
                for i, (source, kind) in enumerate(zip(sources, types, strict=True))
            ]
        if node.name in kept:
            continue
        name, layer = node.name, layer_of.get(node.name)
        if node.op in _HAND_ON and lies_with(sources[0], node):
            handed_on[name] = sources[0]
        elif node.op != "Placeholder" and not is_stateful(node.op) and not has_effect(node, bodies):
            key = (
                *(node.op, node.device, tuple(sources), layer if sources else None),
                *sorted((k, v.SerializeToString(deterministic=True)) for k, v in node.attr.items()),
            )
            if (other := first.setdefault(key, name)) != name:
                same[name] = other
