"""A stage traced once, with its gradient, as a graph that passes are cut from."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.devices import is_device
from pipemesh.randomness.draws import check_no_draw_escaped
from pipemesh.randomness.scope import NeedWholeDraws, Position, WholeDraws
from pipemesh.recurrent.passes.captures import (
    Captured,
    captured_weights,
    check_batch,
    check_no_handle,
    redirect,
)
from pipemesh.recurrent.passes.graph_cut import GraphCut, node_of, tensor_name
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.tracing import (
    Specs,
    check_apart,
    flat_names,
    joined,
    specs_of,
    trace,
)
from pipemesh.recurrent.stage import Home, Stage
from pipemesh.recurrent.watch.finite_values import Probe


@functools.cache
def place_of(home: Home, replica: int, device: str) -> int:
    """Returns the index of a device of a replica in the home; of other devices, the first one's."""
    known = [is_device(device, name) for name in home.replica(replica)]
    return replica * home.group + (known.index(True) if True in known else 0)


class TracedStage:
    """The graph of a stage's forward pass and its gradient, for one piece of the batch.

    It contains all replicas. Names of weights, inputs, outputs and gradients are in their order.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Specs,  # of a replica, for one microbatch
        cutting: Cutting,
        has_step: bool,
        whole_draws: Callable[[], WholeDraws],
        input_places: Sequence[int] | None = None,  # device indices in a replica; by default 0
        keeps_fetched: bool = False,  # whether actions share the weights that they fetch
    ) -> None:
        self.given = stage
        self.keeps_fetched = keeps_fetched and bool(stage.fetched)
        self._input_places = input_places or [0] * len(inputs)
        what = f"stage {stage.name!r}"

        def position(part: tf.Tensor, whole: WholeDraws | None = None) -> Position:
            parts, size, count = cutting.num_parts, cutting.part_size, cutting.num_slices
            length = cutting.slice_size
            return Position(part, parts, size, whole, count, length, span=cutting.span)

        replicas, slices = cutting.replicas, (cutting.num_slices, cutting.span)
        try:
            self._trace = trace(stage, inputs, has_step, replicas, position, *slices)
        except NeedWholeDraws:
            known = functools.partial(position, whole=whole_draws())
            self._trace = trace(stage, inputs, has_step, replicas, known, *slices)
        graph, self.replicas = self._trace.function.graph, self._trace.replicas
        if stage.of_home.group > 1:
            for number, replica in enumerate(self.replicas):
                devices = stage.of_home.replica(number)
                replica.devices = (
                    [devices[place] for place in stage.theta_places],
                    [devices[place] for place in self._input_places],
                    [devices[place] for place in stage.carry_places or [0] * len(stage.carry)],
                )
        self._num_forward = len(graph.get_operations())
        end = len(graph.inputs) - len(graph.captures)
        # Placeholders of microbatch and step.
        self.scalars = [t.name for t in graph.inputs[end - 2 : end]]
        self._check_apart()
        check_batch(graph, what, cutting)
        self._captured: list[Captured] = captured_weights(graph)
        check_no_draw_escaped(graph, stage.name, cutting.num_parts * cutting.num_slices)
        replicas = self.replicas
        for replica in replicas[1:]:
            begin, end = replica.operations[0]
            operations = graph.get_operations()[begin:end]
            check_no_handle(operations, self._captured, what, replica.device)
            replica.copy_captured(graph, self._captured)
        # The tensors' own names, not those of the traced function's results: these wait for
        # everything stateful in the function, and so also for the gradient.
        self.outputs = [t.name for replica in replicas for t in replica.outputs]
        self._specs = {t.name: tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs}
        self.theta = [
            name
            for replica in replicas
            for name in [
                *(t.name for t in replica.theta),
                *(replica.copies.get(weight.name, weight.name) for weight in self._captured),
            ]
        ]
        self.summaries = replicas[-1].summaries
        self.inputs = [t.name for replica in replicas for t in replica.inputs]
        self.output_specs = specs_of(self.replicas[0].outputs)
        carry = self._find_carry(cutting)
        self._replicas: dict[str, int] = {}
        # Of placeholders of arguments the index of the device in a replica.
        self._argument_places: dict[str, int] = {}
        # Of each output the index of its device in a replica.
        self.output_places = [self.place(t.name) for t in self.replicas[0].outputs]
        # By node of the forward pass.
        operations = graph.get_operations()
        self.layers = {
            operation.name: span.layer
            for replica in replicas
            for span in replica.spans
            for operation in operations[span.begin : span.end]
        }
        # Weights outside of theta become the last tensors of theta, so that gradients flow to them.
        self.captured = [weight.outer for weight in self._captured]
        self.captured_from = [weight.given for weight in self._captured]
        with tf.device(stage.device):
            values = [tf.stop_gradient(tensor) for tensor in self.captured]
        # With all weights that it uses as theta, and its summaries as carry.
        self.stage = dataclasses.replace(
            stage,
            theta=[*stage.theta, *values],
            places=[*stage.owners, *(0 for _ in values)],
            carry=carry,
        )

    def _find_carry(self, cutting: Cutting) -> list[Any]:
        """Finds names and places of the carry; returns its values before the first microbatch."""
        stage, count, replicas = self.given, len(self.given.carry), self.replicas
        # A stage that is traced for each slice may hand on more than it gets.
        grows = cutting.span is not None and stage.recurrent
        count_out = len(replicas[0].handed_on) if grows else count
        # Replicas of a recurrent stage have their own carry, but hand on summaries.
        self.num_own = count if stage.recurrent else 0  # each
        self.num_handed_on = count_out if stage.recurrent else 0
        starts = replicas if stage.recurrent else replicas[:1]
        ends = replicas if stage.recurrent else replicas[-1:]
        with tf.device(stage.device):
            summed = [] if self.summaries is None else [tf.constant("")]
        self.carry = [t.name for r in starts for t in r.carry[:count]]
        self.carry += [t.name for t in replicas[0].carry[count:]]
        self.carry_out = [t.name for r in ends for t in r.carry_out[:count_out]]
        self.carry_out += [t.name for t in replicas[-1].carry_out[count_out:]]
        places = stage.carry_places or [0] * count
        # Of each tensor of the carry the index of its device in the home.
        self.carry_places = [
            number * stage.of_home.group + place
            for number in range(len(starts))
            for place in places
        ]
        carry: list[Any] = []
        for place, value in zip(self.carry_places, [*stage.carry] * len(starts), strict=True):
            with tf.device(stage.devices[place]):
                is_unset = isinstance(value, tf.TensorSpec)
                carry.append(tf.zeros(value.shape, value.dtype) if is_unset else value)
        self.carry_places += [0 for _ in summed]
        self.carry_out_places = self.carry_places
        if grows:
            home, devices = stage.of_home, [t.device for r in ends for t in r.handed_on]
            numbers = [number for number in range(len(ends)) for _ in range(count_out)]
            self.carry_out_places = [
                place_of(home, number, device)
                for number, device in zip(numbers, devices, strict=True)
            ] + [0 for _ in summed]
        return [*carry, *summed]

    def handed(self, number: int) -> list[tuple[str, str]]:
        """Returns the carry that a replica takes from the one before, with its names there."""
        if not number:
            return []
        taken = self.replicas[number].carry[self.num_own :]
        given = self.replicas[number - 1].carry_out[self.num_handed_on :]
        return [(a.name, b.name) for a, b in zip(taken, given, strict=True)]

    def differentiate(
        self, live: Iterable[int], frozen: Container[int] = (), to_inputs: bool = True
    ) -> None:
        """Adds the gradient of `live` outputs to the graph, once, before any other method.

        `frozen` weights, by index in theta, get none, and inputs only if it goes `to_inputs`.
        """
        graph, live = self._trace.function.graph, list(live)
        self.gradients = joined(
            [
                replica.differentiate(
                    graph,
                    self.stage,
                    self._captured,
                    live,
                    number * len(self.output_specs),
                    number * self.num_handed_on,
                    frozen,
                    to_inputs,
                )
                for number, replica in enumerate(self.replicas)
            ]
        )
        of_carry = self.gradients.of_carry
        of_carry += [None] * (len(self.carry) - len(of_carry))
        self._check_apart()
        self._replicas = self._find_replicas(graph)
        self._argument_places = {
            **dict(zip(self.theta, itertools.cycle(self.stage.theta_places))),
            **dict(zip(self.inputs, itertools.cycle(self._input_places))),
            **{
                name: place % self.given.of_home.group
                for name, place in zip(self.carry, self.carry_places, strict=True)
            },
        }
        probed = [name for replica in self.replicas for name in replica.probes.names]
        self.cut = GraphCut(
            graph,
            {inner.name: outer for outer, inner in graph.captures},
            self._prepare,
            self.layers,
            [*self._results(), *self.handed_on, *probed],
        )
        self.effects = self.cut.effects(self._num_forward)
        self.weights = [*dict.fromkeys(self._joins.get(name, name) for name in self.theta)]

    @functools.cached_property
    def _joins(self) -> dict[str, str]:
        """Returns for each fetched weight that actions share the tensor that its slices become."""
        if not self.keeps_fetched:
            return {}
        fetched = [name for name, _ in self.fetched()]
        probed = [name for replica in self.replicas for name in replica.probes.names]
        return self.cut.joins(fetched, [*self._results(), *probed], self.place)

    def fetched(self) -> Iterator[tuple[str, int]]:
        """Yields the names of fetched weights of each replica, with their devices in the home."""
        numbers = itertools.cycle(range(len(self.stage.theta)))
        for name, i in zip(self.theta, numbers, strict=False):
            if i in self.stage.fetched:
                yield name, self.stage.owners[i]

    def joined_from(self) -> list[tuple[int, str]]:
        """Returns for each weight which of `weights` actions take in its place, and its spec."""
        places = {name: number for number, name in enumerate(self.weights)}
        taken = [self._joins.get(name, name) for name in self.theta]
        return [(places[name], str(self.spec(name))) for name in taken]

    def fetch_for_each_action(self) -> None:
        """Lets actions fetch weights for themselves, before any of them is made."""
        self.keeps_fetched = False
        vars(self).pop("_joins", None)
        self.weights = [*dict.fromkeys(self.theta)]

    def joined(self) -> list[str]:
        """Returns the names of the tensors that actions take in place of fetched weights."""
        return [*dict.fromkeys(self._joins.values())]

    def join(self, theta: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the tensors of `weights` in the current graph; slices are joined."""
        values: dict[str, tf.Tensor] = {}
        owners = itertools.cycle(self.stage.theta_devices)
        for name, tensor, owner in zip(self.theta, theta, owners, strict=False):
            # The gradient of an eager function has another graph, which cannot import the tensor.
            with tf.device(owner):
                values[name] = tf.identity(tensor) if name in self._joins else tensor
        for number, replica in enumerate(self.replicas):
            joined = [name for name in self.weights if self.replica(name) == number]
            with tf.device(replica.device):
                values.update(zip(joined, self.cut.paste(values, joined), strict=True))
        return [values[name] for name in self.weights]

    def _check_apart(self) -> None:
        """Raises if a replica uses a tensor of another one."""
        if len(self.replicas) > 1:
            graph = self._trace.function.graph
            microbatch = graph.get_tensor_by_name(self.scalars[0])
            check_apart(graph, self.replicas, microbatch, f"stage {self.given.name!r}")

    def check_pure(self) -> None:
        """Raises if anything in the graph has side effects or state; see `check_pure`."""
        self.cut.check_pure(
            f"stage {self.stage.name!r}",
            "a stage is computed microbatch by microbatch, and again in the backward pass",
        )

    def _find_replicas(self, graph: tf.Graph) -> dict[str, int]:
        """Returns the replica of each node and argument placeholder that belongs to one."""
        operations = graph.get_operations()
        numbers: dict[str, int] = {}
        for number, replica in enumerate(self.replicas):
            for begin, end in replica.operations:
                numbers.update((op.name, number) for op in operations[begin:end])
            arguments = [*replica.theta, *replica.carry, *replica.inputs]
            names = [*(t.name for t in arguments), *replica.copies.values()]
            numbers.update((node_of(name), number) for name in names)
        return numbers

    def _prepare(self, nodes: Sequence[tf.compat.v1.NodeDef]) -> None:
        """Makes the nodes of each replica use its own placeholders for captured weights."""
        redirect(nodes, self._captured)
        for node in nodes:
            copies = self.replicas[self._replicas.get(node.name, 0)].copies
            for number, source in enumerate(node.input if copies else ()):
                if not source.startswith("^") and tensor_name(source) in copies:
                    node.input[number] = copies[tensor_name(source)]

    def replica(self, name: str) -> int:
        """Returns the replica that a tensor belongs to; 0 for a tensor of none."""
        return self._replicas.get(node_of(name), 0)

    def place(self, name: str) -> int:
        """Returns the index, in the stage's home, of a tensor's device."""
        home, replica = self.given.of_home, self.replica(name)
        if home.group == 1:
            return replica
        if name in self._argument_places:
            return replica * home.group + self._argument_places[name]
        operation = self._trace.function.graph.get_operation_by_name(node_of(name))
        return place_of(home, replica, operation.device)

    def spec(self, name: str) -> tf.TensorSpec:
        """Returns the shape and dtype of a tensor of the graph."""
        if name not in self._specs:
            tensor = self._trace.function.graph.get_tensor_by_name(name)
            self._specs[name] = tf.TensorSpec(tensor.shape, tensor.dtype)
        return self._specs[name]

    def nodes(self, place: int) -> Iterator[Any]:
        """Returns all nodes of the forward and backward pass on a device, given by its index."""
        return self.cut.nodes(self._results(), lambda node: self.place(f"{node}:0") == place)

    def num_nodes(self) -> int:
        """Counts the operations of a microbatch, forward and backward, without recomputation."""
        return len(self.cut.ancestors(self._results()))

    @property
    def handed_on(self) -> list[str]:
        """Names of the carry that replicas take from earlier ones."""
        return [name for number in range(len(self.replicas)) for name, _ in self.handed(number)]

    def _results(self) -> list[str]:
        grads = self.gradients
        of_probes = [name for replica in self.replicas for name in replica.probes.gradients]
        names = [*grads.of_theta, *grads.of_inputs, *grads.of_carry, *of_probes]
        return [*self.outputs, *self.carry_out, *flat_names(names)]

    def forward_probes(self) -> list[Probe]:
        """Returns the probes of the forward pass."""
        computed = self.cut.ancestors([*self.outputs, *self.carry_out])
        return [
            dataclasses.replace(probe, replica=number)
            for number, replica in enumerate(self.replicas)
            for probe in replica.probes.forward(lambda name: node_of(name) in computed)
        ]

    def backward_probes(self, is_first: bool) -> list[Probe]:
        """Returns the probes of the backward pass; the first stage has different ones."""
        grads = self.gradients
        upstream = [] if is_first else [*grads.of_inputs, *grads.of_carry]
        computed = self.cut.ancestors(flat_names([*upstream, *grads.of_theta]))
        return [
            dataclasses.replace(probe, replica=number)
            for number, replica in enumerate(self.replicas)
            for probe in replica.probes.backward(is_first, lambda name: node_of(name) in computed)
        ]
