"""Merges nodes of a traced graph that compute the same, before parts of it are pasted.

TensorFlow's graph optimizer does the same, but after pasting: again in each copy of each part, at a
cost that grows with the number of copies. Python traces a new constant for each number, so every
second or third node of a layer is a duplicate.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence

import tensorflow as tf

from pipemesh.backend.gradients import had_gradient, passes_on
from pipemesh.backend.graphs import Bodies
from pipemesh.backend.operation_kinds import LOOPS, has_effect, is_stateful

# They pass their input on, and need no gradient any more.
_HAND_ON = frozenset(("Identity", "StopGradient", "PreventGradient"))


def use_first(
    nodes: Sequence[tf.compat.v1.NodeDef],
    bodies: Bodies,
    layer_of: Mapping[str, str],
    kept: Container[str],
) -> None:
    """Makes nodes use the first of all nodes that compute the same; see the module.

    It removes no node: unused nodes are not pasted. Nodes stay distinct if they belong to different
    layers (except constants), because recomputation is chosen by layer. So do nodes on different
    devices, and nodes that have state, check or print. `nodes` are in topological order, without
    control dependencies, and change in place. Nodes in `kept` stay because other code uses their
    names.
    """
    first: dict[Hashable, str] = {}
    # The node that replaces a node, and the tensor that replaces the output of a node.
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
            # It exists for the gradient and lies on one device, its tensors on several. A tensor
            # that other code needs by name still exists.
            passed_on[node.name] = sources
        elif had_gradient(node):
            passed_on[node.name] = [
                source if lies_with(source, node) else f"{node.name}:{i}"
                for i, source in enumerate(sources)
            ]
        elif node.op in LOOPS and tf.resource.as_datatype_enum in node.attr["T"].list.type:
            # The loop passes on a variable that it reads. A variable cannot be kept in a buffer.
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
