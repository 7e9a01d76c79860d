"""The passes of a stage over one microbatch, as functions that are cut from its traced graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import results_beside_sources
from pipemesh.backend.operation_kinds import has_effects
from pipemesh.backend.operations import Call, sum_in_order
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.replica import GradName, flat_names
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import Specs
from pipemesh.recurrent.stage import Grads, Tensors
from pipemesh.recurrent.watch.finite_values import Probe, write_note


@dataclasses.dataclass(frozen=True)
class Part:
    """A function on the devices of its replica.

    Attributes:
        device: the first device of the replica.
        call: returns a call of the function; with collectives, each time of a new function.
        has_note: True if it takes and returns a note.
    """

    device: str
    call: Callable[[], Call]
    has_note: bool

    def __call__(self, arguments: Tensors, note: Any = None) -> tuple[Tensors, Any]:
        """Returns the results and the note; without a note of its own it returns the given one."""
        with tf.device(self.device):
            if not self.has_note:
                return self.call()(arguments), note
            *results, note = self.call()([*arguments, note])
            return results, note


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """The results of a `B` or an `I`.

    Attributes:
        accumulators: the sums of weight gradients; an `I` leaves them unchanged.
        input_grads: the gradient of each input, None if there is none.
        carry_grads: the gradient of each carry, None if there is none.
        pending: after an `I`, the tensors that its `W` needs.
        notes: for each replica, where a value was not finite; see `finite_values`.
    """

    accumulators: Tensors | None
    input_grads: Grads
    carry_grads: Grads
    pending: Tensors
    notes: Tensors


def accumulated(
    totals: Sequence[tf.Tensor | None],
    grads: Sequence[GradName],
    specs: Sequence[tf.TensorSpec],
    devices: Sequence[str],
    pasted: Iterator[tf.Tensor],
) -> Tensors:
    """Returns the sums of weights' gradients after a microbatch.

    `totals` is None for the first microbatch. `grads` are names, two for a sparse gradient, and
    `pasted` maps names to tensors.
    """
    new = []
    for total, grad, spec, device in zip(totals, grads, specs, devices, strict=True):
        with tf.device(device):
            values = tf.cast(next(pasted), spec.dtype)
            if isinstance(grad, str):
                # Not `+`: the graph optimizer merges chains of additions into one at their end,
                # even across the control dependencies that order actions, and so creates cycles.
                new.append(values if total is None else tf.add_n([total, values]))
            else:
                total = tf.zeros(spec.shape, spec.dtype) if total is None else total
                new.append(tf.tensor_scatter_nd_add(total, next(pasted)[:, None], values))
    return new


class Cuts:
    """Names of tensors and nodes on both sides of the cuts.

    Args:
        traced: the stage.
        recomputed: returns True for a node of the forward pass that the backward pass recomputes.
        is_twice: True if a `W` recomputes such nodes again.

    Attributes:
        grad_placeholders: the incoming gradients of a backward pass: for each floating output, then
            for each floating carry of a recurrent stage.
    """

    def __init__(
        self, traced: TracedStage, recomputed: Callable[[str], bool], is_twice: bool = False
    ) -> None:
        self._traced = traced
        self._recomputed = recomputed
        self._is_twice = is_twice
        grads = traced.gradients
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
        given = [*traced.carry, *traced.handed_on, *traced.inputs]
        known |= {node_of(name) for name in given}
        known -= {node_of(name) for name in traced.scalars}
        # A reshaped tensor is the same memory: keeping it separately would count it twice.
        known -= traced.cut.reshapes(self.computed)
        wanted = [*self.theta_names, *self.upstream_names]
        return traced.cut.frontier(wanted, known)

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
        return [name for name in [*grads.of_inputs, *grads.of_carry] if name is not None]

    def nodes(self, kind: str, is_first: bool) -> set[str]:
        """Returns the nodes that an action of a kind (`F`, `R`, `B`, `I` or `W`) computes.

        The first stage computes no gradient of its inputs.
        """
        cut, given = self._traced.cut, [*self.kept, *self.grad_placeholders]
        upstream = [] if is_first else self.upstream_names
        if kind == "F":
            return self.computed
        if kind == "R":
            return cut.ancestors(self.remade, self.kept)
        if kind == "B":
            return cut.ancestors([*self.theta_names, *upstream], given)
        if kind == "I":
            return cut.ancestors([*upstream, *self.pending], given)
        return cut.ancestors(self.theta_names, self.pending)

    @functools.cached_property
    def input_grad_nodes(self) -> set[str]:
        """Nodes that an `I` computes."""
        cuts = [*self.kept, *self.grad_placeholders]
        wanted = self.upstream_names or self._shared_names()
        return self._traced.cut.ancestors(wanted, cuts) & self.per_microbatch

    def _shared_names(self) -> list[str]:
        """Returns the tensors that several weights' gradients need.

        For a stage whose inputs have no gradient, its `I` computes them. Else its `W` would have to
        do everything, and the schedule would assume wrong durations.
        """
        cut = self._traced.cut
        cuts = [*self.kept, *self.grad_placeholders]
        count: dict[str, int] = {}
        for name in self._traced.gradients.of_theta:
            if name is not None:
                for node in cut.ancestors(flat_names([name]), cuts):
                    count[node] = count.get(node, 0) + 1
        shared = {n for n, c in count.items() if c > 1} & self.per_microbatch
        return cut.frontier(self.theta_names, shared, cuts)

    @functools.cached_property
    def pending(self) -> list[str]:
        """Names of the tensors that an `I` leaves for its `W`, besides the arguments of the `I`."""
        known = self.input_grad_nodes - (self.again if self._is_twice else set())
        # As for kept tensors.
        known -= self._traced.cut.reshapes(known)
        known |= {node_of(name) for name in [*self.kept, *self.grad_placeholders]}
        return self._traced.cut.frontier(self.theta_names, known)


class Passes:
    """The forward pass, the backward pass and its halves, under one choice of remat.

    All are parts of one graph. A part computes only nodes that no earlier part has computed, and
    the tensors on the cuts are passed on. A recomputed node counts as not computed by the forward
    pass. Each part recomputes tensors that depend on weights alone: they are the same for every
    microbatch, so keeping them would waste memory.

    Args:
        traced: the stage.
        recomputed: returns True for a node of the forward pass that the backward pass recomputes.
        accumulator_dtypes: of the sum of each theta's gradients.
        forward_probes: the probes of the forward pass.
        backward_probes: the probes of the backward pass.
        is_twice: True if the half for the weights recomputes such nodes again.

    Attributes:
        cuts: the tensors between the parts.
    """

    def __init__(
        self,
        traced: TracedStage,
        recomputed: Callable[[str], bool],
        accumulator_dtypes: Sequence[tf.DType],
        forward_probes: Sequence[Probe],
        backward_probes: Sequence[Probe],
        is_twice: bool = False,
    ) -> None:
        self._traced = traced
        self._forward_probes = forward_probes
        self._backward_probes = backward_probes
        self.cuts = Cuts(traced, recomputed, is_twice)
        self._dtypes = [*accumulator_dtypes] * len(traced.replicas)

    # The passes. Each replica has its own functions: a call ends when all of its checks and prints
    # are done, and a replica must not wait for another one.

    def forward(
        self, theta: Tensors, carry: Tensors, inputs: Tensors, scalars: Tensors, notes: Tensors
    ) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Runs one microbatch and returns outputs, carry, tensors to keep, and notes."""
        outputs: Tensors = []
        new_notes: Tensors = []
        # Kept tensors that are arguments are not passed through a function.
        known: dict[str, tf.Tensor] = {}
        parts = zip(self._traced.replicas, self._forward, notes, strict=True)
        for number, (replica, part, note) in enumerate(parts):
            mine = inputs[number * len(replica.inputs) :][: len(replica.inputs)]
            given = [t.name for t in [*replica.carry, *replica.inputs]]
            known.update(zip(given, [*carry, *mine], strict=True))
            results, note = part([*theta, *carry, *mine, *scalars], note)
            count = len(replica.outputs)
            outputs += results[:count]
            carry, kept = results[count:][: len(carry)], results[count + len(carry) :]
            known.update(zip(self._own(self.cuts.kept, number, self._given), kept, strict=True))
            new_notes.append(note)
        return outputs, carry, [known[name] for name in self.cuts.kept], new_notes

    def recompute(self, theta: Tensors, kept: Tensors, scalars: Tensors) -> Tensors:
        """Returns what `forward` would keep without recomputation; see `backward`."""
        known = dict(zip(self.cuts.kept, kept, strict=True))
        for number, part in enumerate(self._recompute):
            results, _ = part([*theta, *kept, *scalars])
            names = self._own(self.cuts.remade, number, self.cuts.kept)
            known.update(zip(names, results, strict=True))
        return [known[name] for name in self.cuts.remade]

    def backward(
        self,
        theta: Tensors,
        kept: Tensors,
        grads: Tensors,
        scalars: Tensors,
        accumulators: Tensors | None,
        notes: Tensors,
    ) -> BackwardResult:
        """Runs the whole backward pass of one microbatch.

        Args:
            theta: the weights.
            kept: the tensors that `forward` kept.
            grads: the gradient of each floating output, then of each floating carry that a
                recurrent stage has returned.
            scalars: the microbatch's index and the global step, int64.
            accumulators: sums of weight gradients so far; None for the first microbatch.
            notes: for each replica, where a value was not finite before; see `finite_values`.
        """
        parts = self._backward if accumulators is None else self._backward_and_add
        arguments = [*theta, *kept, *grads, *scalars, *(accumulators or ())]
        sums: Tensors = []
        upstream: Tensors = []
        new_notes: Tensors = []
        for number, (part, note) in enumerate(zip(parts, notes, strict=True)):
            results, note = part(arguments, note)
            count = self.accumulator_replicas.count(number)
            sums += results[:count]
            upstream += results[count:]
            new_notes.append(note)
        return self._result(sums, upstream, [], new_notes)

    def input_grad(
        self, theta: Tensors, kept: Tensors, grads: Tensors, scalars: Tensors, notes: Tensors
    ) -> BackwardResult:
        """Runs the half that other stages wait for; arguments as those of `backward`."""
        given = [*self.cuts.kept, *self.cuts.grad_placeholders]
        known = dict(zip(given, [*kept, *grads], strict=True))
        upstream: Tensors = []
        new_notes: Tensors = []
        for number, (part, note) in enumerate(zip(self._input_grad, notes, strict=True)):
            results, note = part([*theta, *kept, *grads, *scalars], note)
            count = len(self._upstream_names(number))
            upstream += results[:count]
            pending = self._own(self.cuts.pending, number, given)
            known.update(zip(pending, results[count:], strict=True))
            new_notes.append(note)
        pending = [known[name] for name in self.cuts.pending]
        return self._result(None, upstream, pending, new_notes)

    def weight_grad(
        self, theta: Tensors, pending: Tensors, scalars: Tensors, accumulators: Tensors | None
    ) -> Tensors:
        """Runs the other half; returns the sums of weight gradients."""
        parts = self._weight_grad if accumulators is None else self._weight_grad_and_add
        arguments = [*theta, *pending, *scalars, *(accumulators or ())]
        return [total for part in parts for total in part(arguments)[0]]

    def _result(
        self,
        accumulators: Tensors | None,
        upstream: Tensors,
        pending: Tensors,
        notes: Tensors,
    ) -> BackwardResult:
        grads = self._traced.gradients
        values = iter(upstream)
        of_inputs = [None if name is None else next(values) for name in grads.of_inputs]
        of_carry = [None if name is None else next(values) for name in grads.of_carry]
        return BackwardResult(accumulators, of_inputs, of_carry, pending, notes)

    def zero_gradients(self) -> Tensors:
        """Returns the accumulators before the first microbatch."""
        zeros = []
        for spec, place in zip(self.accumulator_specs, self.accumulator_places, strict=True):
            with tf.device(self._traced.stage.devices[place]):
                zeros.append(tf.zeros(spec.shape, spec.dtype))
        return zeros

    def theta_gradients(self, accumulators: Tensors) -> Grads:
        """Returns the gradient of each theta, summed over replicas; None if there is none."""
        values = iter(accumulators)
        of_theta = self._traced.gradients.of_theta
        grads = [None if name is None else next(values) for name in of_theta]
        count = len(grads) // len(self._traced.replicas)
        totals: Grads = []
        for i, device in enumerate(self._traced.stage.theta_devices):
            part = [g for g in grads[i::count] if g is not None]
            # Gradients of all replicas are summed on the weight's device, once per step.
            with tf.device(device):
                totals.append(sum_in_order(part) if part else None)
        return totals

    @functools.cached_property
    def accumulator_places(self) -> list[int]:
        """The index in the home of the device of each sum of weight gradients."""
        return [self._traced.place(theta) for theta in self._differentiated]

    @functools.cached_property
    def accumulator_owners(self) -> list[int]:
        """The index in the home of the device where the sums of all replicas are added."""
        traced = self._traced
        owners = itertools.cycle(traced.stage.owners)
        named = zip(owners, traced.gradients.of_theta)  # noqa: B905
        return [owner for owner, name in named if name is not None]

    @functools.cached_property
    def accumulator_replicas(self) -> list[int]:
        """The replica of each sum of weight gradients."""
        return [self._traced.replica(theta) for theta in self._differentiated]

    @functools.cached_property
    def _differentiated(self) -> list[str]:
        """Placeholders of the weights with a gradient."""
        named = zip(self._traced.theta, self._traced.gradients.of_theta, strict=True)
        return [theta for theta, name in named if name is not None]

    @functools.cached_property
    def _given(self) -> set[str]:
        """Names of the arguments of forward functions, which need not be returned."""
        return {*self._traced.carry, *self._traced.handed_on, *self._traced.inputs}

    def _own(self, names: Sequence[str], number: int, given: Container[str]) -> list[str]:
        """Returns the names that a replica computes, because they are not given."""
        replica = self._traced.replica
        return [name for name in names if name not in given and replica(name) == number]

    def _upstream_names(self, number: int) -> list[str]:
        """Returns the gradients of a replica that other actions wait for."""
        grads, count = self._traced.gradients, len(self._traced.replicas[number].inputs)
        names = grads.of_inputs[number * count :][:count]
        names = [*names, *grads.of_carry] if number == 0 else names
        return [name for name in names if name is not None]

    # The functions, made on first use.

    def make(self) -> None:
        """Makes the functions of `forward` and `backward` now, for bodies of loops and branches."""
        _ = self._forward, self._backward_and_add

    @functools.cached_property
    def _forward(self) -> list[Part]:
        parts = []
        for number, replica in enumerate(self._traced.replicas):
            kept = self._own(self.cuts.kept, number, self._given)
            part = self._part(
                number,
                [t.name for t in [*replica.carry, *replica.inputs]],
                [*(t.name for t in [*replica.outputs, *replica.carry_out]), *kept],
                probes=self._forward_probes,
                effects=[
                    name
                    for name in self._traced.effects
                    if self._traced.replica(f"{name}:0") == number
                ],
            )
            parts.append(part)
        return parts

    @functools.cached_property
    def _recompute(self) -> list[Part]:
        return [
            self._part(
                number,
                self.cuts.kept,
                self._own(self.cuts.remade, number, self.cuts.kept),
                checked=self.cuts.computed,
            )
            for number in range(len(self._traced.replicas))
        ]

    @functools.cached_property
    def _backward(self) -> list[Part]:
        return self._backward_parts(adds=False)

    @functools.cached_property
    def _backward_and_add(self) -> list[Part]:
        return self._backward_parts(adds=True)

    def _backward_parts(self, adds: bool) -> list[Part]:
        arguments = [*self.cuts.kept, *self.cuts.grad_placeholders]
        return [
            self._part(
                number,
                arguments,
                self._upstream_names(number),
                gradients=True,
                adds=adds,
                probes=self._backward_probes,
                checked=self.cuts.computed,
            )
            for number in range(len(self._traced.replicas))
        ]

    @functools.cached_property
    def _input_grad(self) -> list[Part]:
        arguments = [*self.cuts.kept, *self.cuts.grad_placeholders]
        computed = self.cuts.input_grad_nodes
        # Without the tensors that an `I` leaves for its `W`.
        probes = [
            dataclasses.replace(
                probe, tensors=tuple(t for t in probe.tensors if node_of(t) in computed)
            )
            for probe in self._backward_probes
        ]
        return [
            self._part(
                number,
                arguments,
                [*self._upstream_names(number), *self._own(self.cuts.pending, number, arguments)],
                probes=probes,
                checked=self.cuts.computed,
            )
            for number in range(len(self._traced.replicas))
        ]

    @functools.cached_property
    def _weight_grad(self) -> list[Part]:
        return self._weight_grad_parts(adds=False)

    @functools.cached_property
    def _weight_grad_and_add(self) -> list[Part]:
        return self._weight_grad_parts(adds=True)

    def _weight_grad_parts(self, adds: bool) -> list[Part]:
        options = {"gradients": True, "adds": adds, "checked": self.cuts.computed}
        return [
            self._part(number, self.cuts.pending, [], **options)
            for number in range(len(self._traced.replicas))
        ]

    @functools.cached_property
    def accumulator_specs(self) -> Specs:
        """Shapes and dtypes of the sums of weight gradients."""
        named = zip(self._traced.theta, self._dtypes, self._traced.gradients.of_theta, strict=True)
        return [
            tf.TensorSpec(self._traced.spec(theta).shape, dtype)
            for theta, dtype, name in named
            if name is not None
        ]

    def _part(
        self,
        number: int,
        arguments: list[str],
        fetches: list[str],
        gradients: bool = False,
        adds: bool = False,
        probes: Sequence[Probe] = (),
        effects: Sequence[str] = (),
        checked: Container[str] = (),
    ) -> Part:
        """Returns a function of theta, `arguments`, the scalars, the accumulators and the note.

        It takes accumulators only if it `adds`. It returns the gradients of the replica's weights
        (or its accumulators with them added), `fetches`, and the note. Without probes of the
        replica there is no note. Its results wait for the `effects`. It does not check values of
        nodes in `checked` again.
        """
        traced, device = self._traced, self._traced.replicas[number].device
        probes = [probe for probe in probes if probe.replica == number]
        probed = flat_names([probe.tensors for probe in probes])
        num_theta = len(traced.theta) // len(traced.replicas)
        grads = traced.gradients.of_theta[number * num_theta :][:num_theta] if gradients else []
        grads = [grad for grad in grads if grad is not None]
        wanted = flat_names(grads)
        every = [*traced.theta, *arguments, *traced.scalars]
        nodes = [f"{name}:0" for name in effects]
        used = traced.cut.used([*wanted, *fetches, *probed, *nodes], every)
        if probes or traced.cut.has_collectives:
            used.add(traced.scalars[0])
        taken = [i for i, name in enumerate(every) if name in used]
        names = [every[i] for i in taken]
        sums = [i for i, replica in enumerate(self.accumulator_replicas) if replica == number]
        totals = [self.accumulator_specs[i] for i in sums]
        where = [traced.stage.devices[self.accumulator_places[i]] for i in sums]
        specs = [*map(traced.spec, names), *(totals if adds else ())]
        end = len(every) + (len(self.accumulator_specs) if adds else 0)
        if adds:
            taken += [len(every) + i for i in sums]
        if probes:
            taken, specs = [*taken, end], [*specs, tf.TensorSpec([], tf.int64)]

        def run(*tensors: tf.Tensor) -> Tensors:
            values = dict(zip(names, tensors[: len(names)], strict=True))
            before = tensors[len(names) :][: len(totals)] if adds else [None] * len(totals)
            with tf.device(device):
                # Each result gets an identity, which waits for all checks and prints.
                due = values[traced.scalars[0]] if traced.cut.has_collectives else None
                pasted = iter(
                    traced.cut.paste(values, [*wanted, *fetches, *probed], effects, checked, due)
                )
                results = accumulated(before, grads, totals, where, pasted) if gradients else []
                results += [next(pasted) for _ in fetches]
                if probes:
                    groups = [[next(pasted) for _ in probe.tensors] for probe in probes]
                    results.append(write_note(tensors[-1], values[traced.scalars[0]], groups))
                return results

        def make() -> Call:
            several = traced.stage.of_home.group > 1
            with results_beside_sources() if several else contextlib.nullcontext():
                function = tf.function(run, autograph=False).get_concrete_function(*specs)
            return Call(function, taken, has_effects(function.graph.as_graph_def()))

        if not traced.cut.has_collectives:
            make = functools.cache(make)
            make()
        return Part(device, make, bool(probes))
