"""The order in which other dims are folded into the batch's, in what the whole batch draws."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import tensorflow as tf

from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.randomness.examples.flow import ExampleFlow
from pipemesh.randomness.examples.labels import NOBODYS, Label, along
from pipemesh.randomness.scope import WholeDraw, WholeDraws


def labels_of_batch(tensors: Sequence[tf.TensorSpec], dim: int) -> list[Label]:
    """Whose the elements of a pipeline's inputs are, which are cut along `dim`."""
    return [along(dim, t.shape.rank, np.arange(static_sizes(t)[dim])) for t in tensors]


class DrawsOfStage:
    """What a stage draws for the whole batch, and where in it the examples are.

    Args:
        graph: of the stage, traced with the whole batch.
        drawn: what was drawn, by name.
        inputs: gives labels of the graph's inputs, by name; the others are nobody's.
        examples: how many the batch has.
    """

    def __init__(
        self,
        graph: tf.Graph,
        drawn: Mapping[str, WholeDraw],
        inputs: Callable[[], Mapping[str, Label | None]],
        examples: int,
    ) -> None:
        self._graph, self._inputs, self._examples = graph, inputs, examples
        self._flow: ExampleFlow | None = None
        self.whole = WholeDraws(drawn, self._before)

    def labels(self, tensors: Sequence[tf.Tensor]) -> list[Label | None]:
        """Whose the elements of tensors of the graph are."""
        return [self._followed().label(tensor) for tensor in tensors]

    def _followed(self) -> ExampleFlow:
        if self._flow is None:
            known = self._inputs()
            given = [known.get(tensor.name, NOBODYS) for tensor in self._graph.inputs]
            self._flow = ExampleFlow(self._graph, given)
        return self._flow

    def _before(self, name: str, dim: int, folded: int) -> int:
        if folded == 1:
            return 1
        draw = self.whole.of[name]
        orders = [n for n in range(1, folded + 1) if folded % n == 0]
        given = {n: self._supposed(draw, dim, n) for n in orders}
        reason = "each processor draws a slice of its own"
        if draw.parts:
            flow = self._followed()
            fitting = [n for n in orders if flow.fits(given[n])]
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                kind = flow.obstacle(given[fitting[0]])
                reason = (
                    f"what a {kind} operation does with them is not known"
                    if kind
                    else "they meet nothing that is known to belong to an example"
                )
            else:
                reason = "in no order do they meet activations of the same example only"
        raise PipelineError(
            f"layer {name.rpartition(':')[0]!r} draws random numbers of shape {draw.sizes} for the "
            f"whole batch; other dims, of {folded} elements, are folded into dim {dim} with the "
            f"{self._examples} examples, and whether they come before or behind these cannot be "
            f"found out: {reason}. Draw the numbers in a shape where the batch is a dim of its own "
            "(before that dim is reshaped), or use a single microbatch"
        )

    def _supposed(self, draw: WholeDraw, dim: int, before: int) -> list[tuple[tf.Tensor, Label]]:
        """The parts of a draw, and whose their elements would be in an order."""
        size, rank = draw.sizes[dim], len(draw.sizes)
        behind = size // (before * self._examples)
        examples = np.arange(size) // behind % self._examples
        return [
            (part, along(dim, rank, examples[place[dim] :][: static_sizes(part)[dim]]))
            for part, place in draw.parts
        ]
