"""A stage traced once, with its gradient, as a graph that passes are cut from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import label_scope
from pipemesh.backend.tagged import tagged
from pipemesh.randomness import (
    LayerSpan,
    NeedWholeDraws,
    Position,
    Replay,
    WholeDraw,
    WholeDraws,
    layer_spans,
    plan_free_randomness,
)
from pipemesh.randomness.escaped_draws import check_no_draw_escaped
from pipemesh.randomness.examples.whole_batch import DrawsOfStage, labels_of_batch
from pipemesh.recurrent.passes.captures import (
    Captured,
    captured_weights,
    check_batch,
    check_no_handle,
    redirect,
)
from pipemesh.recurrent.passes.gradients import flat_names
from pipemesh.recurrent.passes.graph_cut import GraphCut, node_of, tensor_name
from pipemesh.recurrent.passes.replica import Replica, joined
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
        replicas: into how many parts each microbatch is cut once more, one a replica.
    """

    num_microbatches: int
    microbatch_size: int
    batch_dim: int
    replicas: int = 1

    @property
    def num_parts(self) -> int:
        """How many parts the whole batch has: those of the first microbatch, of the second, ..."""
        return self.num_microbatches * self.replicas

    @property
    def part_size(self) -> int:
        """How many examples a part has."""
        return self.microbatch_size // self.replicas


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

    Where there are several replicas, all of them are in the graph. Then the weights, the inputs,
    the outputs and the gradients are those of the first replica, of the second, and so on.

    Args:
        stage: the stage.
        inputs: specs of the inputs that a replica gets of one microbatch, with static shapes.
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
        output_specs: shapes and dtypes of the outputs of a replica.
        layers: for each node of the forward pass that belongs to a layer the layer's name.
        theta_layers: for each weight the layers that use it.
        input_layers: for each input the layers that use it.
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
        num_replicas = cutting.replicas

        def trace(whole: WholeDraws | None) -> Any:
            self.replicas: list[Replica] = []
            self.summaries: Summaries | None = None

            def position(part: tf.Tensor) -> Position:
                return Position(part, cutting.num_parts, cutting.part_size, whole)

            def finish(begin: int, *tensors: Any) -> None:
                theta, carry, inputs, outputs, carry_out = tensors
                if len(self.replicas) == num_replicas - 1:
                    self.summaries = Summaries.found()
                if self.summaries is not None:
                    carry = [*carry, self.summaries.before]
                    carry_out = [*carry_out, self.summaries.after]
                spans = layer_spans()
                replay, probes = Replay(), StageProbes(spans, theta, inputs, outputs)
                end = len(tf.compat.v1.get_default_graph().get_operations())
                device = stage.devices[len(self.replicas)]
                tensors = (theta, carry, inputs, outputs, carry_out)
                self.replicas.append(
                    Replica(device, *tensors, spans, replay, probes, [(begin, end)])
                )

            return _trace(stage, inputs, position, has_step, {}, finish, num_replicas)

        try:
            traced = trace(None)
        except NeedWholeDraws:
            traced = trace(whole_draws())
        # Functions inside the graph (loops, branches) live as long as what was traced.
        self._traced = traced
        graph = traced.graph
        self._num_forward = len(graph.get_operations())
        what = f"stage {stage.name!r}"
        check_batch(graph, what, cutting.batch_dim, cutting.part_size, cutting.num_parts)
        self._captured: list[Captured] = captured_weights(graph)
        check_no_draw_escaped(graph, stage.name, cutting.num_parts)
        replicas, first = self.replicas, self.replicas[0]
        for replica in replicas[1:]:
            begin, end = replica.operations[0]
            own = graph.get_operations()[begin:end]
            check_no_handle(own, self._captured, what, replica.device)
            replica.copy_captured(graph, self._captured)
        # The tensors' own names, not those of what the traced function returns: that waits for
        # everything stateful in the function, and so also for the gradient.
        self.outputs = [t.name for replica in replicas for t in replica.outputs]
        self.carry_out = [t.name for t in replicas[-1].carry_out]
        self._specs = {t.name: tf.TensorSpec(t.shape, t.dtype) for t in graph.inputs}
        self.theta = [
            name
            for replica in replicas
            for name in [
                *(t.name for t in replica.theta),
                *(replica.copies.get(weight.name, weight.name) for weight in self._captured),
            ]
        ]
        before = [] if self.summaries is None else [self.summaries.before]
        self.carry = [*(t.name for t in first.carry[: len(stage.carry)]), *(t.name for t in before)]
        self.inputs = [t.name for replica in replicas for t in replica.inputs]
        end = len(graph.inputs) - len(graph.captures)
        self.scalars = [t.name for t in graph.inputs[end - 2 : end]]
        self.output_specs = specs_of(first.outputs)
        self.layers = _layers(graph, [span for replica in replicas for span in replica.spans])
        self.theta_layers, self.input_layers = first.probes.theta_layers, first.probes.input_layers
        self.captured = [weight.outer for weight in self._captured]
        with tf.device(stage.device):
            values = [tf.stop_gradient(tensor) for tensor in self.captured]
            carry = [*stage.carry, *(tf.constant("") for _ in before)]
        self.given = stage
        self.stage = dataclasses.replace(stage, theta=[*stage.theta, *values], carry=carry)

    def differentiate(self, live: Iterable[int]) -> None:
        """Adds the gradient to the graph; to be called once, before anything below.

        Args:
            live: those of a replica's outputs that a gradient arrives at.
        """
        graph, live = self._traced.graph, list(live)
        self.gradients = joined(
            [
                replica.differentiate(
                    graph, self.stage, self._captured, live, number * len(self.output_specs)
                )
                for number, replica in enumerate(self.replicas)
            ]
        )
        self._places = self._find_places(graph)
        probed = [name for replica in self.replicas for name in replica.probes.names]
        self.cut = GraphCut(
            graph,
            {inner.name: outer for outer, inner in graph.captures},
            self._prepare,
            self.layers,
            [*self.outputs, *self.carry_out, *self._gradient_names(), *probed],
        )
        self.effects = self.cut.effects(self._num_forward)

    def check_pure(self) -> None:
        """Raises if anything in the graph has side effects or state; see `purity`."""
        self.cut.check_pure(
            f"stage {self.stage.name!r}",
            "a stage is computed microbatch by microbatch, and again in the backward pass",
        )

    def _find_places(self, graph: Any) -> dict[str, int]:
        """For the nodes of all replicas but the first the number of the replica."""
        operations = graph.get_operations()
        places: dict[str, int] = {}
        num_outputs = len(self.output_specs)
        for output, name in self.gradients.of_outputs.items():
            places[node_of(name)] = output // num_outputs
        for number, replica in enumerate(self.replicas):
            for begin, end in replica.operations if number else ():
                places.update((op.name, number) for op in operations[begin:end])
            given = [*(t.name for t in [*replica.theta, *replica.inputs]), *replica.copies.values()]
            places.update((node_of(name), number) for name in given)
        return places

    def _prepare(self, nodes: Sequence[Any]) -> None:
        """Lets nodes use the tensor that stands for what was captured, each replica its own."""
        redirect(nodes, self._captured)
        for node in nodes:
            copies = self.replicas[self._places.get(node.name, 0)].copies
            for number, source in enumerate(node.input if copies else ()):
                if not source.startswith("^") and tensor_name(source) in copies:
                    node.input[number] = copies[tensor_name(source)]

    def place(self, name: str) -> int:
        """The number of the replica that a tensor belongs to; 0 for what belongs to none."""
        return self._places.get(node_of(name), 0)

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
        return [
            dataclasses.replace(probe, place=number)
            for number, replica in enumerate(self.replicas)
            for probe in replica.probes.forward(lambda name: node_of(name) in computed)
        ]

    def backward_probes(self, is_first: bool) -> list[Probe]:
        """Where the backward pass is looked at; `is_first` says whether this is the first stage."""
        grads = self.gradients
        upstream = [] if is_first else [*grads.of_inputs, *grads.of_carry]
        wanted = [name for name in [*upstream, *flat_names(grads.of_theta)] if name is not None]
        computed = self.cut.ancestors(wanted)
        of_probes, of_inputs = iter(grads.of_probes), iter(grads.of_inputs)
        return [
            dataclasses.replace(probe, place=number)
            for number, replica in enumerate(self.replicas)
            for probe in replica.probes.backward(
                [next(of_probes) for _ in replica.probes.sources],
                [next(of_inputs) for _ in replica.inputs],
                is_first,
                lambda name: node_of(name) in computed,
            )
        ]


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
    num_replicas: int = 1,
) -> Any:
    """Traces one pass; `finish` may add to the graph while it is open."""
    scalar = tf.TensorSpec([], tf.int64)

    def run_one(
        replica: int, theta: Any, carry: Any, inputs: Any, microbatch: Any, step: Any
    ) -> Any:
        begin = len(tf.compat.v1.get_default_graph().get_operations())
        part, number = microbatch, None
        if num_replicas > 1:
            part, number = microbatch * num_replicas + replica, replica
        where = position(part) if position else None
        with plan_free_randomness(step, where) as draws:
            with contextlib.ExitStack() as tags:
                if where is not None and where.num_microbatches > 1:
                    tags.enter_context(tagged(stage.name, microbatch, number))
                outputs, carry_out = stage.forward(theta, carry, inputs, part, step)
            drawn.update(draws)
            # An output that is an input, or twice the same tensor, gets a name of its own.
            outputs = [tf.identity(t) for t in outputs]
            carry_out = [tf.identity(t) for t in carry_out]
            if finish:
                finish(begin, theta, carry, inputs, outputs, carry_out)
        return outputs, carry_out

    def run(thetas: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        known_step = step if has_step else None
        outputs = []
        for replica, device in enumerate(stage.devices[:num_replicas]):
            with tf.device(device), label_scope("stage", stage.name):
                results, carry = run_one(
                    replica, thetas[replica], carry, inputs[replica], microbatch, known_step
                )
            outputs.extend(results)
            if replica + 1 < num_replicas:
                # As between microbatches, no gradient flows through it.
                carry = [tf.stop_gradient(t) for t in carry]
        return outputs, carry

    function = tf.function(run, autograph=False)
    return function.get_concrete_function(
        [specs_of(stage.theta)] * num_replicas,
        specs_of(stage.carry),
        [inputs] * num_replicas,
        scalar,
        scalar,
    )
