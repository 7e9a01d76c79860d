"""Cuts a traced graph into functions with chosen inputs and outputs."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.compiled import prepare_for_xla
from pipemesh.backend.gradients import had_gradient, passes_on
from pipemesh.backend.graphs import Bodies, imports_by_device
from pipemesh.backend.operation_kinds import (
    CHECK_AND_HAND_ON,
    COLLECTIVES,
    LOOPS,
    RESHAPES,
    RUN_FUNCTIONS,
    check_pure,
    has_effect,
    is_stateful,
)
from pipemesh.backend.operations import JOINED, SHARED

# Parts of them may begin from constants. In an action that is not due, a loop would wait for what
# it reads, and a collective for its peers.
_ONLY_IF_DUE = COLLECTIVES | RUN_FUNCTIONS
# They pass their input on, and need no gradient any more.
_HAND_ON = frozenset(("Identity", "StopGradient", "PreventGradient"))
# They make one tensor of slices, in the form that a layer computes with.
_JOIN = frozenset(("ConcatV2", "Identity", "Cast", "Pad", "PadV2", *RESHAPES))


def use_first(
    nodes: Sequence[tf.compat.v1.NodeDef],
    bodies: Bodies,
    layer_of: Mapping[str, str],
    kept: Container[str],
) -> None:
    """Makes nodes use the first of all nodes that compute the same, in place.

    TensorFlow's optimizer does the same, but after pasting: again in each copy of each part, at a
    cost that grows with the number of copies. Python traces a new constant for each number, so
    every second or third node of a layer is a duplicate.

    Nodes are in topological order, without control dependencies. No node is removed, because unused
    nodes are not pasted. Nodes stay distinct if they belong to different layers (except constants),
    because recomputation is chosen by layer. So do nodes on different devices, nodes that have
    state, check or print, and the `kept` ones, whose names other code uses.
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


class GraphCut:
    """A traced graph of a pure function, addressed by tensor names, from which parts can be cut.

    Only data dependencies are kept. Operations that run only because of control dependencies, such
    as assertions and prints, are pasted on request.
    """

    def __init__(
        self,
        graph: tf.Graph,
        captures: Mapping[str, tf.Tensor],  # by placeholder, the tensor of another graph
        prepare: Callable[[Sequence[Any]], None],  # changes the nodes before anything else
        layer_of: Mapping[str, str],
        asked_for: Iterable[str],  # all tensors that parts may return
    ) -> None:
        graph_def = graph.as_graph_def()
        prepare(graph_def.node)
        self._graph = graph
        self._graph_def = graph_def
        self._captures = dict(captures)
        self._nodes = {node.name: node for node in graph_def.node}
        for node in graph_def.node:
            data = [source for source in node.input if not source.startswith("^")]
            del node.input[:]
            node.input.extend(data)
            # Every node has its device; colocation groups would name missing nodes.
            node.attr.pop("_class", None)
            # Without this attribute, TensorFlow shows the current name in errors. With it, errors
            # show the name of the inlined node, which begins with the action.
            node.experimental_debug_info.SetInParent()
        self._groups = collectives.nccl_groups(graph_def.node)
        self._called: dict[str, tuple[frozenset[str], frozenset[str]]] = {}
        kept = set(map(node_of, asked_for))
        use_first(graph_def.node, self._bodies, layer_of, kept)

    def ancestors(self, tensors: Iterable[str], cuts: Iterable[str] = ()) -> set[str]:
        """Returns the names of all nodes that `tensors` need when the tensors `cuts` are given."""
        stop = set(cuts)
        seen: set[str] = set()
        todo = [node_of(name) for name in tensors if name not in stop]
        while todo:
            name = todo.pop()
            if name in seen:
                continue
            seen.add(name)
            todo.extend(node_of(source) for source in self.sources(name) if source not in stop)
        return seen

    @property
    def captured(self) -> list[str]:
        """Names of the placeholders of tensors of other graphs."""
        return [*self._captures]

    @functools.cached_property
    def _bodies(self) -> Bodies:
        """The functions that nodes call."""
        return Bodies(self._graph_def)

    def kinds(self, name: str) -> frozenset[str]:
        """Returns the types of a node and of all in the functions that it calls."""
        return self._kinds_and_devices(name)[0]

    def devices(self, name: str) -> frozenset[str]:
        """Returns the devices of a node and of all in the functions that it calls."""
        return self._kinds_and_devices(name)[1]

    def _kinds_and_devices(self, name: str) -> tuple[frozenset[str], frozenset[str]]:
        if name not in self._called:
            within = [*self._bodies.within([self._nodes[name]])]
            kinds, devices = (node.op for node in within), (node.device for node in within)
            self._called[name] = frozenset(kinds), frozenset(devices)
        return self._called[name]

    def reached(
        self, tensors: Iterable[str], within: Container[str], given: Iterable[str]
    ) -> set[str]:
        """Returns the nodes `within` that depend on `tensors` not only through `given` ones."""
        begins, stop, reached = set(tensors), set(given), set[str]()
        for node in self._graph_def.node:
            if node.name in within and any(
                source in begins or (source not in stop and node_of(source) in reached)
                for source in self.sources(node.name)
            ):
                reached.add(node.name)
        return reached

    def in_order(self, tensors: Iterable[str]) -> list[str]:
        """Returns tensors in the order of the graph, which is that of alike stages, too."""
        return sorted(tensors, key=lambda name: (self._places[node_of(name)], name))

    @functools.cached_property
    def _places(self) -> dict[str, int]:
        return {node.name: place for place, node in enumerate(self._graph_def.node)}

    def results_of(self, nodes: Container[str]) -> Iterator[str]:
        """Yields the tensors of nodes that others take."""
        for node in self._graph_def.node:
            for source in self.sources(node.name):
                if node_of(source) in nodes:
                    yield source

    def sources(self, name: str) -> Iterator[str]:
        """Returns the tensors that a node needs; for a collective also the inputs of its peers."""
        yield from map(tensor_name, self._nodes[name].input)
        yield from (f"{other}:0" for other in self._groups.get(name, ()))

    @property
    def has_collectives(self) -> bool:
        """True if the graph has collectives, which two calls of one function would confuse."""
        return bool(self._groups)

    @functools.cached_property
    def asks_if_due(self) -> bool:
        """True if parts of the graph must be told whether their action is due."""
        return any(node.op in _ONLY_IF_DUE for node in self._graph_def.node)

    def used(self, tensors: Sequence[str], arguments: Iterable[str]) -> set[str]:
        """Returns the arguments that are needed to compute `tensors`."""
        stop = set(arguments)
        used = {tensor for tensor, _ in self.uses(self.ancestors(tensors, stop))}
        return stop & used.union(tensors)

    def uses(self, nodes: Iterable[str]) -> Iterator[tuple[str, str]]:
        """Yields the tensors that nodes take, each with the node."""
        for name in nodes:
            for source in self._nodes[name].input:
                yield tensor_name(source), name

    def reshapes(self, nodes: Iterable[str]) -> set[str]:
        """Returns the nodes that only reshape a tensor, or join some that others need too."""
        return {
            name
            for name in nodes
            if self._nodes[name].op in RESHAPES or JOINED in self._nodes[name].attr
        }

    def shared(self, carry: Sequence[str]) -> set[str]:
        """Returns the tensors, of a carry or made here, that sequence slices hand on unchanged."""
        marked = {name for name, node in self._nodes.items() if SHARED in node.attr}
        taken = {same for tensor, _ in self.uses(marked) for same in self.same_value(tensor)}
        return taken.intersection(carry) | {
            tensor for tensor, _ in self.uses(self._nodes) if node_of(tensor) in marked
        }

    def joins(
        self, tensors: Iterable[str], results: Sequence[str], place: Callable[[str], int]
    ) -> dict[str, str]:
        """Returns for each of `tensors` the tensor that it and others are joined to, or itself.

        `results` need it instead of its parts, and it lies at the same `place`.
        """
        joined = {tensor: tensor for tensor in tensors}
        # Without other shapes of the same values, which may differ between slices.
        ends = dict(joined)
        users: dict[str, set[str]] = {}
        for tensor, node in self.uses(self.ancestors(results)):
            users.setdefault(tensor, set()).add(node)

        def follows(name: str, parts: set[str]) -> bool:
            """Returns whether a node joins parts that nothing else uses."""
            taken = {
                source
                for source in map(tensor_name, self._nodes[name].input)
                if self._nodes[node_of(source)].op != "Const"
            }
            return (
                self._nodes[name].op in _JOIN
                and taken <= parts
                and all(users[source] == {name} for source in taken)
                and taken.isdisjoint(results)
                and {*map(place, taken)} == {place(f"{name}:0")}
            )

        while True:
            parts = set(joined.values())
            found = {name for part in parts for name in users.get(part, ()) if follows(name, parts)}
            if not found:
                return ends
            after = {
                tensor_name(source): f"{name}:0"
                for name in found
                for source in self._nodes[name].input
            }
            joined = {tensor: after.get(part, part) for tensor, part in joined.items()}
            for tensor, part in joined.items():
                if self._nodes[node_of(part)].op not in ("Identity", *RESHAPES):
                    ends[tensor] = part

    def same_value(self, tensor: str) -> set[str]:
        """Returns a tensor, and the tensors that are passed on to it unchanged."""
        names = {tensor}
        while (node := self._nodes[node_of(tensor)]).op == "Identity":
            tensor = tensor_name(node.input[0])
            names.add(tensor)
        return names

    def nodes(self, tensors: Iterable[str], chosen: Callable[[str], bool]) -> Iterator[Any]:
        """Returns the chosen nodes that `tensors` need, and those in functions that they call."""
        needed = self.ancestors(tensors)
        yield from self._bodies.within(
            [node for node in self._graph_def.node if node.name in needed and chosen(node.name)]
        )

    def check_pure(self, what: str, why: str) -> None:
        """Raises if anything in the graph has side effects or state; see `check_pure`."""
        check_pure(self._graph_def, what, why)

    def effects(self, before: int) -> list[str]:
        """Returns the names of the nodes, among the first `before`, that check or print."""
        nodes = list(self._graph_def.node)[:before]
        return [node.name for node in nodes if has_effect(node, self._bodies)]

    def descendants(self, tensors: Iterable[str]) -> set[str]:
        """Returns the names of all nodes that depend on any of `tensors`."""
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
        """Returns the tensors of `known` nodes, sorted, that `tensors` need first, given `cuts`."""
        stop = set(cuts)
        return sorted(name for name in self.begins(tensors, known, stop) if name not in stop)

    def begins(
        self, tensors: Iterable[str], known: Container[str], given: Container[str]
    ) -> list[str]:
        """Returns the tensors, of `known` nodes or `given`, that `tensors` need first.

        Graphs that compute the same have them in the same order.
        """
        first: dict[str, None] = {}
        seen: set[str] = set()
        todo = list(tensors)
        while todo:
            tensor = todo.pop()
            node = node_of(tensor)
            if tensor in given or node in known:
                first[tensor] = None
            elif node not in seen:
                seen.add(node)
                todo.extend(self.sources(node))
        return [*first]

    def paste(
        self,
        values: Mapping[str, tf.Tensor],
        fetches: Sequence[str],
        effects: Sequence[str] = (),  # other nodes to paste
        checked: Container[str] = (),  # nodes computed before: what they check is not checked again
        due: tf.Tensor | None = None,  # dead in an action that is not due
        compiles: bool = False,  # whether XLA compiles them, on one device and without checks
    ) -> list[tf.Tensor]:
        """Rebuilds in the current graph the nodes that compute `fetches` from `values`."""
        graph: Any = tf.compat.v1.get_default_graph()
        # A function that is being built captures them; a graph of TF1 has them.
        capture = getattr(graph, "capture", lambda tensor: tensor)
        given = {*values, *self._captures}
        computed = [name for name in dict.fromkeys(fetches) if name not in given]
        keep = self.ancestors([*computed, *(f"{name}:0" for name in effects)], cuts=given)
        part = tf.compat.v1.GraphDef(versions=self._graph_def.versions)
        part.library.CopyFrom(self._graph_def.library)
        nodes = [node for node in self._graph_def.node if node.name in keep]
        part.node.extend(nodes)
        collectives.rename_nccl_groups(part.node)
        for node in part.node:
            if node.op in CHECK_AND_HAND_ON and (compiles or node.name in checked):
                node.op = "Identity"
                node.attr.pop("message", None)
        if compiles:
            prepare_for_xla(part)
        used = {tensor_name(s) for node in nodes for s in node.input} & given
        input_map = {name: values[name] for name in used & values.keys()}
        captured = {name: capture(self._captures[name]) for name in used - values.keys()}
        input_map |= captured
        for node in part.node:
            if due is not None and node.op in _ONLY_IF_DUE:
                node.input.append("^due")
                input_map["^due"] = due
        with imports_by_device():
            pasted = tf.graph_util.import_graph_def(
                part,
                input_map=input_map,
                return_elements=computed,
                name="",
            )
        result = dict(zip(computed, pasted, strict=True))
        for name, tensor in result.items():
            # Shapes that Python code has set are not part of a graph's definition.
            tensor.set_shape(self._graph.get_tensor_by_name(name).shape)
        result |= captured | dict(values)
        return [
            result[name] if name in result else capture(self._captures[name]) for name in fetches
        ]


def tensor_name(source: str) -> str:
    """Returns the tensor name (`node:index`) of a node's input in a GraphDef."""
    return source if ":" in source else f"{source}:0"


def node_of(tensor: str) -> str:
    """Returns the name of the node that produces a tensor."""
    return tensor.rsplit(":", 1)[0]
