"""Where the graph of a stage is cut into passes, under one choice of remat."""

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
        recomputed: whether a node of the forward pass is computed again in the backward pass.
        is_twice: whether a `W` computes such nodes once more.

    Attributes:
        grad_placeholders: the gradients that a backward pass starts from: of each floating output,
            then of each floating carry that is handed on if the stage is recurrent.
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
        """Nodes whose value is another for every microbatch."""
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
        """Nodes of the forward pass that are computed again."""
        return {node for node in self.computed & self.per_microbatch if self._recomputed(node)}

    @property
    def recomputes(self) -> bool:
        """Whether the backward pass can start before the gradient of the outputs is there."""
        return bool(self.again)

    @functools.cached_property
    def kept(self) -> list[str]:
        """Names of what the forward pass leaves for the backward pass."""
        traced = self._traced
        known = (self.computed & self.per_microbatch) - self.again
        # Placeholders cannot be computed again; nor does a replica compute what another one did.
        given = [*traced.carry, *traced.handed_on, *traced.inputs]
        known |= {node_of(name) for name in given}
        known -= {node_of(name) for name in traced.scalars}
        # A tensor in another shape is the same memory: to keep it by itself would count it twice.
        known -= traced.cut.reshapes(self.computed)
        wanted = [*self.theta_names, *self.upstream_names]
        return traced.cut.frontier(wanted, known)

    @functools.cached_property
    def remade(self) -> list[str]:
        """Names of what an `R` leaves: what the forward pass would if nothing were recomputed."""
        return Cuts(self._traced, lambda node: False).kept

    @functools.cached_property
    def theta_names(self) -> list[str]:
        """Gradients of weights; a sparse one has two tensors."""
        return flat_names(self._traced.gradients.of_theta)

    @functools.cached_property
    def upstream_names(self) -> list[str]:
        """Gradients that other actions wait for: of the inputs and of the carry."""
        grads = self._traced.gradients
        return [name for name in [*grads.of_inputs, *grads.of_carry] if name is not None]

    def nodes(self, kind: str, is_first: bool) -> set[str]:
        """What an action of a kind, `F`, `R`, `B`, `I` or `W`, computes of the graph.

        Args:
            kind: of the action.
            is_first: whether it is the first stage, the gradient of whose inputs nobody asks for.
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
        """What an `I` computes of the graph."""
        cuts = [*self.kept, *self.grad_placeholders]
        wanted = self.upstream_names or self._shared_names()
        return self._traced.cut.ancestors(wanted, cuts) & self.per_microbatch

    def _shared_names(self) -> list[str]:
        """Tensors that several weights' gradients need.

        They are what an `I` computes for a stage whose inputs have no gradient. Else its `W`
        would have to do everything, and the schedule would reckon with the wrong durations.
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
        """Names of what an `I` leaves for its `W`, beside what it was given itself."""
        known = self.input_grad_nodes - (self.again if self._is_twice else set())
        # As of what is kept.
        known -= self._traced.cut.reshapes(known)
        known |= {node_of(name) for name in [*self.kept, *self.grad_placeholders]}
        return self._traced.cut.frontier(self.theta_names, known)
