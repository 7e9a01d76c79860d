"""The cuts between the passes of a stage's graph, under one choice of remat."""

from __future__ import annotations

import functools
from collections.abc import Callable

from pipemesh.recurrent.passes.gradients import flat_names
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.traced_stage import TracedStage


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
