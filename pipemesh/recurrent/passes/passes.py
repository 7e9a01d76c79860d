"""The passes of a stage over one microbatch, as functions that are cut from its traced graph."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Container, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.operations import Call
from pipemesh.backend.purity import has_effects
from pipemesh.recurrent.passes.cuts import Cuts
from pipemesh.recurrent.passes.gradients import flat_names
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.traced_stage import Specs, TracedStage
from pipemesh.recurrent.watch.health import write_note
from pipemesh.recurrent.watch.probes import Probe

Tensors = list[tf.Tensor]
Grads = list[tf.Tensor | None]


@dataclasses.dataclass(frozen=True)
class BackwardResult:
    """What a `B` or an `I` gives.

    Attributes:
        accumulators: the sums of weight gradients; after an `I` what was given.
        input_grads: the gradient of each input, None if there is none.
        carry_grads: the gradient of each carry, None if there is none.
        pending: after an `I`, what its `W` needs.
        note: where something was not finite; see `health`.
    """

    accumulators: Tensors | None
    input_grads: Grads
    carry_grads: Grads
    pending: Tensors
    note: tf.Tensor


class Passes:
    """Forward, backward, and both halves of the backward pass, under one choice of remat.

    All are parts of one graph. A part computes what no part before it has computed, and the
    tensors on the cuts between them are handed from one to the next. What is computed again in
    the backward pass counts as not computed by the forward pass. What depends on weights alone
    is computed by each part that needs it: it is the same for every microbatch, so handing it on
    would cost memory for nothing.

    Args:
        traced: the stage.
        recomputed: whether a node of the forward pass is computed again in the backward pass.
        accumulator_dtypes: of the sum of each theta's gradients.
        forward_probes: what the forward pass looks at.
        backward_probes: what the backward pass looks at.

    Attributes:
        cuts: what is handed from one part to the next.
    """

    def __init__(
        self,
        traced: TracedStage,
        recomputed: Callable[[str], bool],
        accumulator_dtypes: Sequence[tf.DType],
        forward_probes: Sequence[Probe],
        backward_probes: Sequence[Probe],
    ) -> None:
        self._traced = traced
        self._forward_probes = forward_probes
        self._backward_probes = backward_probes
        self.cuts = Cuts(traced, recomputed)
        self._dtypes = [*accumulator_dtypes] * len(traced.replicas)

    # The passes.

    def forward(
        self, theta: Tensors, carry: Tensors, inputs: Tensors, scalars: Tensors, note: tf.Tensor
    ) -> tuple[Tensors, Tensors, Tensors, tf.Tensor]:
        """Runs one microbatch.

        Args:
            theta: the weights.
            carry: what the microbatch before handed on.
            inputs: of the stage.
            scalars: the microbatch's index and the global step, int64.
            note: where something was not finite before; see `health`.

        Returns:
            The outputs, the carry, what the backward pass needs, and the note.
        """
        traced = self._traced
        given = dict(zip([*traced.carry, *traced.inputs], [*carry, *inputs], strict=True))
        results, note = self._noting(
            self._forward, [*theta, *carry, *inputs, *scalars], note, self._forward_probes
        )
        num_outputs = len(traced.outputs)
        num_named = num_outputs + len(traced.carry_out)
        # What is kept and was given is not handed through the function.
        computed = iter(results[num_named:])
        kept = [given[name] if name in given else next(computed) for name in self.cuts.kept]
        return results[:num_outputs], results[num_outputs:num_named], kept, note

    def _noting(
        self,
        call: Callable[[Tensors], Tensors],
        arguments: Tensors,
        note: tf.Tensor,
        probes: Sequence[Probe],
    ) -> tuple[Tensors, tf.Tensor]:
        """Calls a function that takes a note and returns it if there are probes."""
        if not probes:
            return call(arguments), note
        *results, note = call([*arguments, note])
        return results, note

    def backward(
        self,
        theta: Tensors,
        kept: Tensors,
        grads: Tensors,
        scalars: Tensors,
        accumulators: Tensors | None,
        note: tf.Tensor,
    ) -> BackwardResult:
        """Runs the whole backward pass of one microbatch.

        Args:
            theta: the weights.
            kept: what `forward` left.
            grads: the gradient of each floating output, then of each floating carry that was
                handed on if the stage is recurrent.
            scalars: the microbatch's index and the global step, int64.
            accumulators: sums of weight gradients so far; None for the first microbatch.
            note: where something was not finite before; see `health`.
        """
        call = self._backward if accumulators is None else self._backward_and_add
        arguments = [*theta, *kept, *grads, *scalars, *(accumulators or ())]
        results, note = self._noting(call, arguments, note, self._backward_probes)
        count = len(self.accumulator_specs)
        return self._result(results[:count], results[count:], [], note)

    def input_grad(
        self, theta: Tensors, kept: Tensors, grads: Tensors, scalars: Tensors, note: tf.Tensor
    ) -> BackwardResult:
        """Runs the half that other stages wait for; arguments as those of `backward`."""
        results, note = self._noting(
            self._input_grad, [*theta, *kept, *grads, *scalars], note, self._input_grad_probes
        )
        count = len(self.cuts.upstream_names)
        given = dict(
            zip([*self.cuts.kept, *self.cuts.grad_placeholders], [*kept, *grads], strict=True)
        )
        computed = iter(results[count:])
        pending = [given[name] if name in given else next(computed) for name in self.cuts.pending]
        return self._result(None, results[:count], pending, note)

    def weight_grad(
        self, theta: Tensors, pending: Tensors, scalars: Tensors, accumulators: Tensors | None
    ) -> Tensors:
        """Runs the other half; returns the sums of weight gradients."""
        call = self._weight_grad if accumulators is None else self._weight_grad_and_add
        return call([*theta, *pending, *scalars, *(accumulators or ())])

    def _result(
        self,
        accumulators: Tensors | None,
        upstream: Tensors,
        pending: Tensors,
        note: tf.Tensor,
    ) -> BackwardResult:
        grads = self._traced.gradients
        values = iter(upstream)
        of_inputs = [None if name is None else next(values) for name in grads.of_inputs]
        of_carry = [None if name is None else next(values) for name in grads.of_carry]
        return BackwardResult(accumulators, of_inputs, of_carry, pending, note)

    def zero_gradients(self) -> Tensors:
        """Accumulators before the first microbatch."""
        zeros = []
        for spec, place in zip(self.accumulator_specs, self.accumulator_places, strict=True):
            with tf.device(self._traced.replicas[place].device):
                zeros.append(tf.zeros(spec.shape, spec.dtype))
        return zeros

    def theta_gradients(self, accumulators: Tensors) -> Grads:
        """The gradient of each theta, summed over the replicas; None if there is none."""
        values = iter(accumulators)
        of_theta = self._traced.gradients.of_theta
        grads = [None if name is None else next(values) for name in of_theta]
        count = len(grads) // len(self._traced.replicas)
        parts = [[g for g in grads[i::count] if g is not None] for i in range(count)]
        # What is alike for all replicas is summed where the weight lies, once a step.
        return [tf.add_n(part) if len(part) > 1 else (part or [None])[0] for part in parts]

    @functools.cached_property
    def accumulator_places(self) -> list[int]:
        """The replica of each sum of weight gradients."""
        named = zip(self._traced.theta, self._traced.gradients.of_theta, strict=True)
        return [self._traced.place(theta) for theta, name in named if name is not None]

    # The functions, made when they are first needed.

    def make(self) -> None:
        """Makes those of `forward` and `backward` now, for use in bodies of loops and branches."""
        self._forward, self._backward_and_add  # noqa: B018

    @functools.cached_property
    def _forward(self) -> Callable[[Tensors], Tensors]:
        traced = self._traced
        given = {*traced.carry, *traced.inputs}
        kept = [name for name in self.cuts.kept if name not in given]
        arguments = [*traced.carry, *traced.inputs]
        fetches = [*traced.outputs, *traced.carry_out, *kept]
        return self._function(
            arguments, fetches, probes=self._forward_probes, effects=traced.effects
        )

    @functools.cached_property
    def _backward(self) -> Callable[[Tensors], Tensors]:
        return self._backward_function(adds=False)

    @functools.cached_property
    def _backward_and_add(self) -> Callable[[Tensors], Tensors]:
        return self._backward_function(adds=True)

    def _backward_function(self, adds: bool) -> Callable[[Tensors], Tensors]:
        arguments = [*self.cuts.kept, *self.cuts.grad_placeholders]
        return self._function(
            arguments,
            self.cuts.upstream_names,
            gradients=True,
            adds=adds,
            probes=self._backward_probes,
            checked=self.cuts.computed,
        )

    @functools.cached_property
    def _input_grad(self) -> Callable[[Tensors], Tensors]:
        arguments = [*self.cuts.kept, *self.cuts.grad_placeholders]
        given = set(arguments)
        pending = [name for name in self.cuts.pending if name not in given]
        fetches = [*self.cuts.upstream_names, *pending]
        return self._function(
            arguments, fetches, probes=self._input_grad_probes, checked=self.cuts.computed
        )

    @functools.cached_property
    def _input_grad_probes(self) -> list[Probe]:
        """Those of the backward pass, without what an `I` leaves to its `W`."""
        computed = self.cuts.input_grad_nodes
        return [
            dataclasses.replace(
                probe, tensors=tuple(t for t in probe.tensors if node_of(t) in computed)
            )
            for probe in self._backward_probes
        ]

    @functools.cached_property
    def _weight_grad(self) -> Callable[[Tensors], Tensors]:
        return self._function(self.cuts.pending, [], gradients=True, checked=self.cuts.computed)

    @functools.cached_property
    def _weight_grad_and_add(self) -> Callable[[Tensors], Tensors]:
        return self._function(
            self.cuts.pending, [], gradients=True, adds=True, checked=self.cuts.computed
        )

    @functools.cached_property
    def accumulator_specs(self) -> Specs:
        """Shapes and dtypes of the sums of weight gradients."""
        named = zip(self._traced.theta, self._dtypes, self._traced.gradients.of_theta, strict=True)
        return [
            tf.TensorSpec(self._traced.spec(theta).shape, dtype)
            for theta, dtype, name in named
            if name is not None
        ]

    def _function(
        self,
        arguments: list[str],
        fetches: list[str],
        gradients: bool = False,
        adds: bool = False,
        probes: Sequence[Probe] = (),
        effects: Sequence[str] = (),
        checked: Container[str] = (),
    ) -> Callable[[Tensors], Tensors]:
        """A function of theta, `arguments`, the scalars, the accumulators if it adds, and the note.

        It returns the weights' gradients, or the accumulators with them added, `fetches`, and the
        note. Without probes there is no note. What it returns waits for the `effects`. What was
        computed before, in `checked`, is not checked again.
        """
        traced = self._traced
        probed = flat_names([probe.tensors for probe in probes])
        wanted = self.cuts.theta_names if gradients else []
        every = [*traced.theta, *arguments, *traced.scalars]
        nodes = [f"{name}:0" for name in effects]
        used = traced.cut.used([*wanted, *fetches, *probed, *nodes], every)
        if probes:
            used.add(traced.scalars[0])
        taken = [i for i, name in enumerate(every) if name in used]
        names = [every[i] for i in taken]
        specs = [traced.spec(name) for name in names]
        rest = list(self.accumulator_specs) if adds else []
        rest += [tf.TensorSpec([], tf.int64)] if probes else []
        taken += range(len(every), len(every) + len(rest))

        def run(*tensors: tf.Tensor) -> Tensors:
            values = dict(zip(names, tensors[: len(names)], strict=True))
            if len(traced.replicas) > 1:
                results_stay.append(_results_stay_where_they_are())
            with tf.device(traced.stage.device):
                # Results get an identity each, which waits for all that checks or tells.
                pasted = traced.cut.paste(values, [*wanted, *fetches, *probed], effects, checked)
                end = len(wanted) + len(fetches)
                results = pasted[len(wanted) : end]
                if probes:
                    looked_at = iter(pasted[end:])
                    groups = [[next(looked_at) for _ in probe.tensors] for probe in probes]
                    where = [traced.replicas[probe.place].device for probe in probes]
                    number = values[traced.scalars[0]]
                    results.append(write_note(tensors[-1], number, groups, where))
                if not gradients:
                    return results
                count = len(self.accumulator_specs)
                totals = list(tensors[len(names) :][:count]) if adds else [None] * count
                return [*self._accumulate(totals, pasted[: len(wanted)]), *results]

        results_stay: list[Any] = []
        function = tf.function(run, autograph=False).get_concrete_function(*specs, *rest)
        return Call(function, taken, has_effects(function.graph.as_graph_def()))

    def _accumulate(self, totals: Grads, flat: Tensors) -> Tensors:
        flat_grads = iter(flat)
        names = [name for name in self._traced.gradients.of_theta if name is not None]
        new = []
        specs = zip(self.accumulator_specs, self.accumulator_places, strict=True)
        for total, name, (spec, place) in zip(totals, names, specs, strict=True):
            with tf.device(self._traced.replicas[place].device):
                if isinstance(name, str):
                    grad = tf.cast(next(flat_grads), spec.dtype)
                    # Not `+`: the graph optimizer merges chains of additions into one at their
                    # end, also across the control dependencies that order actions, and so builds
                    # cycles.
                    new.append(grad if total is None else tf.add_n([total, grad]))
                else:
                    rows, indices = tf.cast(next(flat_grads), spec.dtype), next(flat_grads)
                    total = tf.zeros(spec.shape, spec.dtype) if total is None else total
                    new.append(tf.tensor_scatter_nd_add(total, indices[:, None], rows))
        return new


def _results_stay_where_they_are() -> Any:
    """From now on, an identity in the function that is traced lies where its input lies.

    TensorFlow gives each result of a function an identity when the function's code has ended, by
    which time its own scopes of devices have ended, too. It would lie where the call lies.

    Returns:
        Keeps this so for as long as it lives.
    """
    scope = tf.compat.v1.device(
        lambda node: (node.type == "Identity" and node.inputs[0].device) or node.device
    )
    scope.__enter__()
    return scope
