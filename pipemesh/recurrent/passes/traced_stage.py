"""A stage traced once, with its gradient, as a graph that passes are cut from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import label_scope
from pipemesh.backend.structure import is_differentiable
from pipemesh.backend.tagged import tagged
from pipemesh.randomness import (
    LayerSpan,
    NeedWholeDraws,
    Position,
    Replay,
    WholeDraw,
    WholeDraws,
    gradient_scope,
    layer_spans,
    plan_free_randomness,
)
from pipemesh.randomness.escaped_draws import check_no_draw_escaped
from pipemesh.randomness.examples.whole_batch import DrawsOfStage, labels_of_batch
from pipemesh.recurrent.passes.captures import Captured, captured_weights, check_batch, redirect
from pipemesh.recurrent.passes.gradients import differentiate, flat_names
from pipemesh.recurrent.passes.graph_cut import GraphCut, node_of
from pipemesh.recurrent.passes.summaries import Summaries
from pipemesh.recurrent.stage import Stage
from pipemesh.recurrent.watch.probes import Probe, StageProbes

Specs = list[tf.TensorSpec]


@dataclasses.dataclass(frozen=True)
class Cutting:
    """How the batch is cut into microbatches.

    Attributes:
        num_microbatches: how many there are.
        microbatch_size: how many examples each has.
        batch_dim: the dim of the pipeline's inputs along which they are cut.
    """

    num_microbatches: int
    microbatch_size: int
    batch_dim: int


class WholeBatch:
    """The stages traced with the whole batch, as far as anybody asks.

    Only what is drawn is of interest, and where in it the batch lies.

    Args:
        stages: the stages.
        inputs: specs of the whole batch's inputs.
        has_step: whether there is a global step.
        batch_dim: the dim along which the inputs are cut.
    """

    def __init__(
        self, stages: Sequence[Stage], inputs: Specs, has_step: bool, batch_dim: int
    ) -> None:
        self._stages = stages
        self._inputs = inputs
        self._has_step = has_step
        self._batch_dim = batch_dim
        self._draws: list[DrawsOfStage] = []
        self._traced: list[Any] = []

    def draws(self, stage: int) -> WholeDraws:
        """All random draws of a stage."""
        while len(self._draws) <= stage:
            number = len(self._draws)
            if number == 0:
                specs = self._inputs
                labels = functools.partial(labels_of_batch, specs, self._batch_dim)
            else:
                results, _ = self._traced[-1].graph.structured_outputs
                specs = specs_of(results)
                labels = functools.partial(self._draws[-1].labels, results)
            drawn: dict[str, WholeDraw] = {}
            traced = _trace(self._stages[number], specs, None, self._has_step, drawn)
            first = len(self._stages[number].theta) + len(self._stages[number].carry)
            inputs = traced.graph.inputs[first : first + len(specs)]
            self._traced.append(traced)
            self._draws.append(
                DrawsOfStage(
                    traced.graph,
                    drawn,
                    lambda inputs=inputs, labels=labels: dict(
                        zip([t.name for t in inputs], labels(), strict=True)
                    ),
                    self._inputs[0].shape[self._batch_dim],
                )
            )
        return self._draws[stage].whole


def output_specs(stage: Stage, inputs: Specs, has_step: bool) -> Specs:
    """Shapes and dtypes of what a stage returns for given inputs, without its gradient."""
    outputs, _ = _trace(stage, inputs, None, has_step, {}).graph.structured_outputs
    return specs_of(outputs)


def specs_of(tensors: Sequence[tf.Tensor]) -> Specs:
    """Shape and dtype of each tensor."""
    return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


class TracedStage:
    """The graph of a stage's forward pass and its gradient, for one microbatch.

    Args:
        stage: the stage.
        inputs: specs of one microbatch's inputs, with static shapes.
        cutting: how the batch is cut.
        has_step: whether there is a global step.
        whole_draws: gives the stage's random draws for the whole batch.

    Attributes:
        given: the stage as given.
        stage: the stage, with all weights that it uses as theta, and its summaries as carry.
        cut: the graph.
        theta: names of the tensors that stand for weights.
        carry: names of the placeholders of the carry.
        inputs: names of the inputs' placeholders.
        scalars: names of the placeholders of microbatch and step.
        outputs: names of the outputs.
        carry_out: names of the carry that is handed on.
        gradients: names of the gradients.
        effects: names of the nodes that check or tell something.
        captured: what the stage reaches otherwise than through its theta: the last tensors of
            theta, as gradients flow to them.
        output_specs: shapes and dtypes of the outputs.
        layers: for each node of the forward pass that belongs to a layer the layer's name.
        probes: where values that are not finite are looked for.
        summaries: what the stage tells a TF1 graph; its last carry.
    """

    def __init__(
        self,
        stage: Stage,
        inputs: Specs,
        cutting: Cutting,
        has_step: bool,
        whole_draws: Callable[[], WholeDraws],
    ) -> None:
        self.stage = stage
        found: dict[str, Any] = {}

        def trace(whole: WholeDraws | None) -> Any:
            def position(microbatch: tf.Tensor) -> Position:
                return Position(
                    microbatch, cutting.num_microbatches, cutting.microbatch_size, whole
                )

            def finish(spans: Any, theta: Any, carry: Any, inputs: Any, *results: Any) -> None:
                outputs, carry_out = results
                found["summaries"] = summaries = Summaries.found()
                if summaries is not None:
                    carry, carry_out = [*carry, summaries.before], [*carry_out, summaries.after]
                # Their names, not those of what the traced function returns: that waits for
                # everything stateful in the function, and so also for the gradient.
                found["outputs"] = [t.name for t in outputs]
                found["carry_out"] = [t.name for t in carry_out]
                found["spans"] = spans
                found["replay"] = Replay()
                found["probes"] = StageProbes(spans, theta, inputs, outputs)
                found["tensors"] = (theta, carry, inputs, outputs, carry_out)

            return _trace(stage, inputs, position, has_step, {}, finish)

        try:
            traced = trace(None)
        except NeedWholeDraws:
            traced = trace(whole_draws())
        # Functions inside the graph (loops, branches) live as long as what was traced.
        self._traced = traced
        graph = traced.graph
        self._num_forward = len(graph.get_operations())
        what = f"stage {stage.name!r}"
        check_batch(
            graph, what, cutting.batch_dim, cutting.microbatch_size, cutting.num_microbatches
        )
        self._captured: list[Captured] = captured_weights(graph)
        self._tensors: tuple[list[tf.Tensor], ...] = found["tensors"]
        check_no_draw_escaped(graph, stage.name, cutting.num_microbatches)
        self._replay: Replay = found["replay"]
        self.outputs: list[str] = found["outputs"]
        self.carry_out: list[str] = found["carry_out"]
        self.probes: StageProbes = found["probes"]
        names = [t.name for t in graph.inputs[: len(graph.inputs) - len(graph.captures)]]
        self._specs = {t.name: tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs}
        theta_end = len(stage.theta)
        carry_end = theta_end + len(stage.carry)
        self.theta = [*names[:theta_end], *(weight.name for weight in self._captured)]
        self.summaries: Summaries | None = found["summaries"]
        before = [] if self.summaries is None else [self.summaries.before]
        self.carry = [*names[theta_end:carry_end], *(t.name for t in before)]
        self.inputs, self.scalars = names[carry_end:-2], names[-2:]
        self.output_specs = [self.spec(name) for name in self.outputs]
        self.layers = _layers(graph, found["spans"])
        self.captured = [weight.outer for weight in self._captured]
        with tf.device(stage.device):
            values = [tf.stop_gradient(tensor) for tensor in self.captured]
            carry = [*stage.carry, *(tf.constant("") for _ in before)]
        self.given = stage
        self.stage = dataclasses.replace(stage, theta=[*stage.theta, *values], carry=carry)

    def differentiate(self, live: Iterable[int]) -> None:
        """Adds the gradient to the graph; to be called once, before anything below.

        Args:
            live: the outputs that a gradient arrives at.
        """
        theta, carry, inputs, outputs, carry_out = self._tensors
        theta = [*theta, *(weight.source for weight in self._captured)]
        graph, device = self._traced.graph, self.stage.device
        with (
            graph.as_default(),
            tf.device(device),
            label_scope("stage", self.stage.name),
            self._replay.enter(self._replay.tensors),
            gradient_scope(),
        ):
            self.gradients = differentiate(
                self.stage,
                theta,
                carry,
                inputs,
                {i: outputs[i] for i in live if is_differentiable(outputs[i])},
                carry_out,
                self.probes.sources,
            )
        self.cut = GraphCut(
            graph,
            {inner.name: outer for outer, inner in graph.captures},
            lambda nodes: redirect(nodes, self._captured),
            self.layers,
            [*self.outputs, *self.carry_out, *self._gradient_names(), *self.probes.names],
        )
        self.effects = self.cut.effects(self._num_forward)

    def check_pure(self) -> None:
        """Raises if anything in the graph has side effects or state; see `purity`."""
        self.cut.check_pure(
            f"stage {self.stage.name!r}",
            "a stage is computed microbatch by microbatch, and again in the backward pass",
        )

    def spec(self, name: str) -> tf.TensorSpec:
        """Shape and dtype of a tensor of the graph."""
        if name not in self._specs:
            tensor = self._traced.graph.get_tensor_by_name(name)
            self._specs[name] = tf.TensorSpec(tensor.shape, tensor.dtype)
        return self._specs[name]

    def nodes(self) -> Iterator[Any]:
        """All nodes of the forward and the backward pass."""
        return self.cut.nodes([*self.outputs, *self.carry_out, *self._gradient_names()])

    def num_nodes(self) -> int:
        """How many operations a microbatch has, forward and backward, if nothing is recomputed."""
        return len(self.cut.ancestors([*self.outputs, *self.carry_out, *self._gradient_names()]))

    def _gradient_names(self) -> list[str]:
        grads = self.gradients
        names = [*flat_names(grads.of_theta), *grads.of_inputs, *grads.of_carry, *grads.of_probes]
        return [name for name in names if name is not None]

    def forward_probes(self) -> list[Probe]:
        """Where the forward pass is looked at."""
        computed = self.cut.ancestors([*self.outputs, *self.carry_out])
        return self.probes.forward(lambda name: node_of(name) in computed)

    def backward_probes(self, is_first: bool) -> list[Probe]:
        """Where the backward pass is looked at; `is_first` says whether this is the first stage."""
        grads = self.gradients
        upstream = [] if is_first else [*grads.of_inputs, *grads.of_carry]
        wanted = [name for name in [*upstream, *flat_names(grads.of_theta)] if name is not None]
        computed = self.cut.ancestors(wanted)
        return self.probes.backward(
            grads.of_probes, grads.of_inputs, is_first, lambda name: node_of(name) in computed
        )


def _layers(graph: tf.Graph, spans: Sequence[LayerSpan]) -> dict[str, str]:
    operations = graph.get_operations()
    return {
        operation.name: span.layer
        for span in spans
        for operation in operations[span.begin : span.end]
    }


def _trace(
    stage: Stage,
    inputs: Specs,
    position: Callable[[tf.Tensor], Position] | None,
    has_step: bool,
    drawn: dict[str, WholeDraw],
    finish: Callable[..., Any] | None = None,
) -> Any:
    """Traces one pass; `finish` may add to the graph while it is open."""
    scalar = tf.TensorSpec([], tf.int64)

    def run(theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        where = position(microbatch) if position else None
        known_step = step if has_step else None
        with tf.device(stage.device), label_scope("stage", stage.name):
            with plan_free_randomness(known_step, where) as draws:
                with contextlib.ExitStack() as tags:
                    if where is not None and where.num_microbatches > 1:
                        tags.enter_context(tagged(stage.name, microbatch))
                    outputs, carry_out = stage.forward(theta, carry, inputs, microbatch, known_step)
                drawn.update(draws)
                spans = layer_spans()
                # An output that is an input, or twice the same tensor, gets a name of its own.
                outputs = [tf.identity(t) for t in outputs]
                carry_out = [tf.identity(t) for t in carry_out]
                if finish:
                    finish(spans, theta, carry, inputs, outputs, carry_out)
        return outputs, carry_out

    function = tf.function(run, autograph=False)
    return function.get_concrete_function(
        specs_of(stage.theta), specs_of(stage.carry), inputs, scalar, scalar
    )
