"""The passes of a stage over one microbatch, as functions that are cut from its traced graph."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.graphs import results_beside_sources
from pipemesh.backend.operation_kinds import has_effects
from pipemesh.backend.operations import Call, add_rows, zeros
from pipemesh.recurrent.passes.compiling import Compiler, Wanted
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import GradName, flat_names
from pipemesh.recurrent.stage import Tensors
from pipemesh.recurrent.watch.finite_values import Probe, write_note

# The name of a tensor of the stage's graph, or ("sum", its index), or ("note", replica).
Name = str | tuple[str, int]
# Adds the results of one replica to the values, or replaces sums and notes.
Part = Callable[[dict[Name, tf.Tensor]], None]


class WeightSum(NamedTuple):
    """The sum of the gradients of a weight, or of its copy in one replica."""

    grad: GradName
    spec: tf.TensorSpec
    place: int  # the index in the home of its device
    owner: int  # the index of the device where the sums of all replicas are added
    replica: int


def weight_sums(traced: TracedStage, dtypes: Sequence[tf.DType | None]) -> list[WeightSum]:
    """Returns the sum of each weight's gradients, for weights with a gradient."""
    count = len(traced.replicas)
    of_theta = traced.gradients.of_theta
    owners = [*traced.stage.owners] * count
    return [
        WeightSum(
            grad,
            tf.TensorSpec(traced.spec(theta).shape, dtype),
            traced.place(theta),
            owner,
            traced.replica(theta),
        )
        for theta, dtype, owner, grad in zip(
            traced.theta, [*dtypes] * count, owners, of_theta, strict=True
        )
        if grad is not None and dtype is not None
    ]


def by_name(values: Mapping[Name, tf.Tensor], names: Sequence[Name | None]) -> list[Any]:
    """Returns the values with these names; None for None."""
    return [None if name is None else values[name] for name in names]


def accumulated(
    totals: Sequence[tf.Tensor | None],  # None before the first microbatch
    sums: Sequence[WeightSum],
    devices: Sequence[str],
    pasted: Iterator[tf.Tensor],  # the tensors of the gradients; a sparse one has two
) -> Tensors:
    """Returns the sums of weights' gradients after a microbatch."""
    new = []
    for total, weight_sum, device in zip(totals, sums, devices, strict=True):
        spec = weight_sum.spec
        with tf.device(device):
            values = tf.cast(next(pasted), spec.dtype)
            if isinstance(weight_sum.grad, str):
                # Not `+`: the graph optimizer merges chains of additions into one at their end,
                # even across the control dependencies that order actions, and so creates cycles.
                new.append(values if total is None else tf.add_n([total, values]))
            else:
                total = zeros(spec) if total is None else total
                new.append(add_rows(total, next(pasted), values, device))
    return new


class Cuts:
    """The cuts between the passes of a stage's graph, under one choice of remat."""

    def __init__(
        self, traced: TracedStage, recomputed: Callable[[str], bool], is_twice: bool = False
    ) -> None:
        # `is_twice`: a `W` recomputes such nodes again.
        # `recomputed`: of a node of the forward pass.
        self._traced = traced
        self._recomputed = recomputed
        self._is_twice = is_twice
        grads = traced.gradients
        # For each floating output, then for each floating carry of a recurrent stage.
        self.grad_placeholders = [*grads.of_outputs.values(), *grads.of_carry_out.values()]

    @functools.cached_property
    def per_microbatch(self) -> set[str]:
        """Nodes with a different value for every microbatch."""
        traced = self._traced
        return traced.cut.descendants(
            [*traced.carry, *traced.inputs, *traced.scalars, *self.grad_placeholders]
        )

    @functools.cached_property
    def computed(self) -> set[str]:
        """Nodes of the forward pass."""
        return self._traced.cut.ancestors([*self._traced.outputs, *self._traced.carry_out])

    @functools.cached_property
    def again(self) -> set[str]:
        """Nodes of the forward pass that are recomputed."""
        return {node for node in self.computed & self.per_microbatch if self._recomputed(node)}

    @property
    def recomputes(self) -> bool:
        """True if the backward pass can start before the gradient of the outputs arrives."""
        return bool(self.again)

    @functools.cached_property
    def kept(self) -> list[str]:
        """Names of the tensors that the forward pass keeps for the backward pass."""
        traced = self._traced
        known = (self.computed & self.per_microbatch) - self.again
        # Placeholders cannot be recomputed, and a replica does not compute a tensor of another one.
        placeholders = [*traced.carry, *traced.handed_on, *traced.inputs]
        known |= {node_of(name) for name in placeholders}
        known -= {node_of(name) for name in traced.scalars}
        # A reshaped tensor is the same memory: keeping it separately would count it twice.
        known -= traced.cut.reshapes(self.computed)
        # An identity of an input is the same memory, too.
        known -= {node for node in known - set(map(node_of, placeholders)) if self._is_input(node)}
        wanted = [*self.theta_names, *self.upstream_names]
        return traced.cut.frontier(wanted, known)

    def _is_input(self, node: str) -> bool:
        """Returns whether a node is an identity of an input on the same device."""
        traced, tensor = self._traced, f"{node}:0"
        found = traced.cut.same_value(tensor).intersection(traced.inputs)
        return any(traced.place(name) == traced.place(tensor) for name in found)

    @functools.cached_property
    def remade(self) -> list[str]:
        """Names of the tensors that an `R` leaves: those that the mode `none` keeps."""
        return Cuts(self._traced, lambda node: False).kept

    @functools.cached_property
    def theta_names(self) -> list[str]:
        """Names of the gradients of weights; a sparse gradient has two tensors."""
        return flat_names(self._traced.gradients.of_theta)

    @functools.cached_property
    def upstream_names(self) -> list[str]:
        """Names of gradients that other actions wait for: of the inputs and of the carry."""
        grads = self._traced.gradients
        return flat_names([*grads.of_inputs, *grads.of_carry])

    def arguments(self, kind: str) -> list[str]:
        """Returns the tensors that an action starts from, besides weights."""
        if kind == "F":
            return [*self._traced.carry, *self._traced.inputs]
        if kind == "R":
            return self.kept
        return self.pending if kind == "W" else [*self.kept, *self.grad_placeholders]

    def nodes(self, kind: str, is_first: bool) -> set[str]:
        """Returns the nodes that an action computes; the first stage has no input gradients."""
        if kind == "F":
            return self.computed
        results = [*self.remade] if kind == "R" else []
        if kind in "BW":
            results += self.theta_names
        if kind in "BI" and not is_first:
            results += self.upstream_names
        if kind == "I":
            results += self.pending
        return self._traced.cut.ancestors(results, self.arguments(kind))

    @functools.cached_property
    def input_grad_nodes(self) -> set[str]:
        """Nodes that an `I` computes."""
        wanted = self.upstream_names or self._shared_names()
        return self._traced.cut.ancestors(wanted, self.arguments("I")) & self.per_microbatch

    def _shared_names(self) -> list[str]:
        """Returns the tensors that several weights' gradients need.

        A stage whose inputs have no gradient computes them in its `I`. Else its `W` would do
        everything, and the schedule would assume wrong durations.
        """
        cut, cuts = self._traced.cut, self.arguments("I")
        count = collections.Counter(
            node
            for name in self._traced.gradients.of_theta
            for node in cut.ancestors(flat_names([name]), cuts)
        )
        shared = {n for n, c in count.items() if c > 1} & self.per_microbatch
        return cut.frontier(self.theta_names, shared, cuts)

    @functools.cached_property
    def pending(self) -> list[str]:
        """Names of the tensors that an `I` leaves for its `W`, besides the arguments of the `I`."""
        known = self.input_grad_nodes - (self.again if self._is_twice else set())
        # As for kept tensors.
        known -= self._traced.cut.reshapes(known)
        known |= {node_of(name) for name in self.arguments("I")}
        return self._traced.cut.frontier(self.theta_names, known)


class Passes:
    """The forward pass, the backward pass and its halves, under one choice of remat.

    All are parts of one graph. A part computes only nodes that no earlier part has computed, and
    the tensors on the cuts are passed on. Each part recomputes tensors that depend on weights
    alone: they are the same for every microbatch, so keeping them would waste memory.

    Each replica has its own functions: a call ends when all of its checks and prints are done, and
    a replica must not wait for another one.
    """

    def __init__(
        self,
        traced: TracedStage,
        recomputed: Callable[[str], bool],  # of a node of the forward pass
        sums: Sequence[WeightSum],
        forward_probes: Sequence[Probe],
        backward_probes: Sequence[Probe],
        is_twice: bool = False,  # a `W` recomputes such nodes again
        is_first: bool = False,  # gradients of its inputs are computed only if somebody takes them
        compiler: Compiler | None = None,
    ) -> None:
        self._traced = traced
        self._is_first = is_first
        self._compiler = compiler
        self._forward_probes = forward_probes
        self._backward_probes = backward_probes
        self.cuts = Cuts(traced, recomputed, is_twice)
        self.sums = sums
        self._made: dict[tuple[str, bool], list[Part]] = {}

    def run(
        self,
        kind: str,
        weights: Tensors,  # `TracedStage.weights`
        tensors: Tensors,  # `Cuts.arguments`
        scalars: Tensors,  # microbatch and step, int64
        notes: Tensors,  # of each replica
        accumulators: Tensors | None = None,  # for `B` and `W`; None for the first microbatch
    ) -> dict[Name, tf.Tensor]:
        """Runs an action of one microbatch; returns its arguments and its results."""
        traced = self._traced
        names = [*traced.weights, *traced.scalars, *self.cuts.arguments(kind)]
        given = [*weights, *scalars, *tensors]
        values: dict[Name, tf.Tensor] = dict(zip(names, given, strict=True))
        values.update(zip(self.note_names, notes, strict=True))
        values.update((("sum", i), total) for i, total in enumerate(accumulators or ()))
        parts = self._parts(kind, accumulators is not None)
        for number, part in enumerate(parts):
            if kind == "F":
                values.update((name, values[given]) for name, given in traced.handed(number))
            part(values)
        return values

    @property
    def note_names(self) -> list[Name]:
        """The names, in the results of an action, of the notes of the replicas."""
        return [("note", number) for number in range(len(self._traced.replicas))]

    @property
    def sum_names(self) -> list[Name]:
        """The names, in the results of a `B` or `W`, of the sums of weight gradients."""
        return [("sum", i) for i in range(len(self.sums))]

    def make(self) -> None:
        """Makes the functions of `F` and `B` now, for bodies of loops and branches."""
        _ = self._parts("F"), self._parts("B", True)

    def _parts(self, kind: str, adds: bool = False) -> list[Part]:
        """Returns the functions of a pass, one per replica; they take accumulators if it `adds`."""
        if (kind, adds) not in self._made:
            numbers = range(len(self._traced.replicas))
            self._made[kind, adds] = [self._part(kind, number, adds) for number in numbers]
        return self._made[kind, adds]

    def _part(self, kind: str, number: int, adds: bool) -> Part:
        """Returns a function of weights, tensors on the cuts, scalars, sums (if it `adds`), a note.

        It returns the sums of the gradients of the replica's weights, tensors on the cuts, and the
        note, which only replicas with probes have.
        """
        cuts, traced, replica = self.cuts, self._traced, self._traced.replicas[number]
        arguments, probes = cuts.arguments(kind), self._backward_probes if kind in "BI" else ()
        # Operations that the results wait for, and nodes whose values are not checked again.
        effects: list[str] = []
        checked: Container[str] = cuts.computed
        results: list[str] = []
        upstream: list[str] = []
        if kind == "F":
            given = {*traced.carry, *traced.handed_on, *traced.inputs}
            arguments = [t.name for t in [*replica.carry, *replica.inputs]]
            results = [t.name for t in [*replica.outputs, *replica.carry_out]]
            results += self._own(cuts.kept, number, given)
            probes, checked = self._forward_probes, ()
            effects = [name for name in traced.effects if traced.replica(f"{name}:0") == number]
        elif kind == "R":
            results = self._own(cuts.remade, number, arguments)
        elif kind in "BI":
            grads, count = traced.gradients, len(replica.inputs)
            upstream = flat_names(grads.of_inputs[number * count :][:count])
            results = [*upstream]
            results += flat_names(grads.of_carry[number * traced.num_own :][: traced.num_own])
        if kind == "I":
            results += self._own(cuts.pending, number, arguments)
            # Without the tensors that an `I` leaves for its `W`.
            computed = cuts.input_grad_nodes
            probes = [
                dataclasses.replace(
                    probe, tensors=tuple(t for t in probe.tensors if node_of(t) in computed)
                )
                for probe in probes
            ]
        probes = [probe for probe in probes if probe.replica == number]
        probed = flat_names([probe.tensors for probe in probes])
        sums = {i: total for i, total in enumerate(self.sums) if total.replica == number}
        sums = sums if kind in "BW" else {}
        totals = [*sums.values()]
        where = [traced.stage.devices[total.place] for total in totals]
        fetches = [*flat_names([total.grad for total in totals]), *results, *probed]
        every = [*traced.weights, *arguments, *traced.scalars]
        used = traced.cut.used([*fetches, *(f"{name}:0" for name in effects)], every)
        if probes or traced.cut.asks_if_due:
            used.add(traced.scalars[0])
        names = [name for name in every if name in used]
        sum_names: list[Name] = [("sum", i) for i in sums]
        note_name: list[Name] = [("note", number)] if probes else []
        specs = [*map(traced.spec, names), *(total.spec for total in totals if adds)]
        specs += [tf.TensorSpec([], tf.int64) for _ in note_name]
        core = self._compiler and self._compiler.core(
            traced,
            kind,
            replica.device,
            names,
            Wanted(fetches, effects, checked, upstream if self._is_first else ()),
        )

        def run(*tensors: tf.Tensor) -> Tensors:
            values = dict(zip(names, tensors, strict=False))
            before = tensors[len(names) :][: len(totals)] if adds else [None] * len(totals)
            with tf.device(replica.device):
                # Each result gets an identity, which waits for all checks and prints.
                due = values[traced.scalars[0]] if traced.cut.asks_if_due else None
                if core is not None:
                    values = core.run(traced.cut, values, due)
                told = [*effects, *(core.checks if core else ())]
                pasted = iter(traced.cut.paste(values, fetches, told, checked, due))
                returned = accumulated(before, totals, where, pasted)
                returned += [next(pasted) for _ in results]
                if probes:
                    groups = [[next(pasted) for _ in probe.tensors] for probe in probes]
                    returned.append(write_note(tensors[-1], values[traced.scalars[0]], groups))
                return returned

        def make() -> Call:
            several = traced.stage.of_home.group > 1
            with results_beside_sources() if several else contextlib.nullcontext():
                function = tf.function(run, autograph=False).get_concrete_function(*specs)
            return Call(function, has_effects(function.graph.as_graph_def()))

        # With collectives, each call has a new function.
        if not traced.cut.has_collectives:
            make = functools.cache(make)
            make()
        given_names = [*names, *(sum_names if adds else []), *note_name]

        def part(values: dict[Name, tf.Tensor]) -> None:
            with tf.device(replica.device):
                returned = make()([values[name] for name in given_names])
            # Besides sums and notes, equal names mean equal values: a result may replace an
            # argument, but outputs and carries have identities of their own from `tracing`.
            values.update(zip([*sum_names, *results, *note_name], returned, strict=True))

        return part

    def _own(self, names: Sequence[str], number: int, arguments: Container[str]) -> list[str]:
        """Returns the names that a replica computes, because they are not given."""
        replica = self._traced.replica
        return [name for name in names if name not in arguments and replica(name) == number]
