"""Cuts a traced graph into functions of chosen inputs and outputs."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf


class GraphCut:
    """A traced graph, addressed by tensor names, that parts can be taken out of.

    The graph computes a pure function, so only data counts: control dependencies and what hangs
    on them (assertions, mostly) are left out, and checks for NaN become identities. Both have
    state as far as TensorFlow knows, and operations with state are executed one after the other,
    across devices too.

    Args:
        graph: the graph.
        captures: for each placeholder that stands for a tensor of another graph that tensor.
    """

    def __init__(self, graph: tf.Graph, captures: Mapping[str, tf.Tensor]) -> None:
        graph_def = graph.as_graph_def()
        self._graph = graph
        self._graph_def = graph_def
        self._captures = dict(captures)
        self._nodes = {node.name: node for node in graph_def.node}
        for node in graph_def.node:
            data = [source for source in node.input if not source.startswith("^")]
            del node.input[:]
            node.input.extend(data)
            # The whole part lies on one device; groups would name nodes that are left out.
            node.attr.pop("_class", None)
            # Where this is missing, TensorFlow notes the name that the node has now and shows it
            # in errors, instead of the one it gets when the function is inlined, which begins
            # with the action.
            node.experimental_debug_info.SetInParent()
            if node.op == "CheckNumerics":
                node.op = "Identity"
                node.attr.pop("message", None)

    def ancestors(self, tensors: Iterable[str], cuts: Iterable[str] = ()) -> set[str]:
        """Names of all nodes that `tensors` need when the tensors `cuts` are given."""
        stop = set(cuts)
        seen: set[str] = set()
        todo = [node_of(name) for name in tensors if name not in stop]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            todo.extend(
                node_of(tensor_name(source))
                for source in self._nodes[name].input
                if tensor_name(source) not in stop
            )
        return seen

    def used(self, tensors: Iterable[str], given: Iterable[str]) -> set[str]:
        """Which of the tensors `given` are needed to compute `tensors` from all of them."""
        stop = set(given)
        found = stop & set(tensors)
        for node in self.ancestors(tensors, stop):
            found |= stop.intersection(map(tensor_name, self._nodes[node].input))
        return found

    def nodes(self, tensors: Iterable[str]) -> Iterator[Any]:
        """All nodes that `tensors` need, those in the bodies of functions too."""
        bodies = {f.signature.name: f.node_def for f in self._graph_def.library.function}
        needed = self.ancestors(tensors)
        todo: list[Sequence[Any]] = [[n for n in self._graph_def.node if n.name in needed]]
        while todo:
            nodes = todo.pop()
            yield from nodes
            values = [value for node in nodes for value in node.attr.values()]
            called = [f.name for value in values for f in (value.func, *value.list.func)]
            todo.extend(bodies.pop(name) for name in called if name in bodies)

    def descendants(self, tensors: Iterable[str]) -> set[str]:
        """Names of all nodes that depend on any of `tensors`."""
        reached = {node_of(name) for name in tensors}
        consumers: dict[str, list[str]] = {}
        for node in self._graph_def.node:
            for source in node.input:
                consumers.setdefault(node_of(tensor_name(source)), []).append(node.name)
        todo = list(reached)
        while todo:
            for consumer in consumers.get(todo.pop(), ()):
                if consumer not in reached:
                    reached.add(consumer)
                    todo.append(consumer)
        return reached

    def frontier(
        self, tensors: Iterable[str], known: Container[str], cuts: Iterable[str] = ()
    ) -> list[str]:
        """The tensors of `known` nodes, in order, that `tensors` need first.

        Args:
            tensors: what is wanted; those of known nodes are among the result.
            known: names of nodes.
            cuts: tensors that are given, so that nothing before them is needed.
        """
        stop = set(cuts)
        found: dict[str, None] = {}
        seen: set[str] = set()
        todo = list(tensors)
        while todo:
            tensor = todo.pop()
            if tensor in stop:
                continue
            node = node_of(tensor)
            if node in known:
                found[tensor] = None
            elif node not in seen:
                seen.add(node)
                todo.extend(tensor_name(source) for source in self._nodes[node].input)
        return sorted(found)

    def paste(self, values: Mapping[str, tf.Tensor], fetches: Sequence[str]) -> list[tf.Tensor]:
        """Rebuilds in the current graph what computes `fetches` from `values`.

        Args:
            values: for tensor names of the graph the tensors to use instead.
            fetches: names of the tensors wanted; they may be among `values`.
        """
        # In a function that is built; it gets them as captures of its own.
        graph: Any = tf.compat.v1.get_default_graph()
        given = {name: graph.capture(tensor) for name, tensor in self._captures.items()}
        given.update(values)
        computed = [name for name in dict.fromkeys(fetches) if name not in given]
        keep = self.ancestors(computed, cuts=given)
        part = tf.compat.v1.GraphDef(versions=self._graph_def.versions)
        part.library.CopyFrom(self._graph_def.library)
        nodes = [node for node in self._graph_def.node if node.name in keep]
        part.node.extend(nodes)
        used = {tensor_name(s) for node in nodes for s in node.input} & given.keys()
        pasted = tf.graph_util.import_graph_def(
            part,
            input_map={name: given[name] for name in used},
            return_elements=computed,
            name="",
        )
        for name, tensor in zip(computed, pasted, strict=True):
            # A shape that Python code has set is no part of a graph's definition.
            tensor.set_shape(self._graph.get_tensor_by_name(name).shape)
        result = dict(zip(computed, pasted, strict=True))
        return [given[name] if name in given else result[name] for name in fetches]


def tensor_name(source: str) -> str:
    """The tensor name (`node:index`) of a node's input as graphs spell it."""
    return source if ":" in source else f"{source}:0"


def node_of(tensor: str) -> str:
    """The name of the node that produces a tensor."""
    return tensor.rsplit(":", 1)[0]
