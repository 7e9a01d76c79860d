"""The passes of a stage over one microbatch, as functions that are cut from its traced graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Container, Sequence

import tensorflow as tf

from pipemesh.backend.graphs import results_beside_sources
from pipemesh.backend.operation_kinds import has_effects
from pipemesh.backend.operations import Call, sum_in_order
from pipemesh.recurrent.passes.cuts import Cuts
from pipemesh.recurrent.passes.gradients import flat_names
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.part import BackwardResult, Grads, Part, Tensors, accumulated
from pipemesh.recurrent.passes.traced_stage import TracedStage
from pipemesh.recurrent.passes.tracing import Specs
from pipemesh.recurrent.watch.health import write_note
from pipemesh.recurrent.watch.probes import Probe


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
            notes: for each replica, where a value was not finite before; see `health`.
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
