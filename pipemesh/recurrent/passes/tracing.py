"""Traces calls of a stage's Python function, one per replica, and their gradients, into a graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import label_scope, labelled, tagged
from pipemesh.backend.operation_kinds import SUMMARIES
from pipemesh.backend.operations import on_each
from pipemesh.backend.static_shape import static_sizes
from pipemesh.backend.structure import Gradient, is_differentiable
from pipemesh.errors import PipelineError
from pipemesh.plan.slices import Span
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.example_flow import DrawsOfStage, labels_of_batch
from pipemesh.randomness.scope import (
    LayerSpan,
    Position,
    Replay,
    WholeDraw,
    WholeDraws,
    gradient_scope,
    layer_spans,
)
from pipemesh.recurrent.passes.captures import Captured
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.stage import Stage, calling_for, calling_on
from pipemesh.recurrent.watch.finite_values import StageProbes


def detached(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors without gradients, pinned so that each stays on its device."""
    return on_each([tensor.device for tensor in tensors], tf.stop_gradient, tensors)


def identity_beside(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a tensor on its own device; without one, on the device of the scope."""
    with tf.device(tensor.device):
        return tf.identity(tensor)


Specs = list[tf.TensorSpec]


def specs_of(tensors: Sequence[tf.Tensor]) -> Specs:
    """Returns the shape and dtype of each tensor."""
    return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


# The tensor of a gradient; values and row indices if it is sparse; None if there is no gradient.
GradName = str | tuple[str, str] | None


@dataclasses.dataclass(frozen=True)
class StageGradients:
    """Names of the gradients in a traced graph, None where there is none."""

    of_outputs: dict[int, str]  # placeholders, by index of the floating output
    of_carry_out: dict[int, str]  # empty if the carry has no gradient
    of_theta: list[GradName]
    of_inputs: list[str | None]
    of_carry: list[str | None]


def _grad_placeholders(tensors: Mapping[int, tf.Tensor]) -> dict[int, tf.Tensor]:
    placeholders: dict[int, tf.Tensor] = {}
    for i, t in tensors.items():
        if is_differentiable(t):
            with tf.device(t.device):
                placeholders[i] = tf.compat.v1.placeholder(t.dtype, t.shape)
    return placeholders


def _gradients(
    results: list[tf.Tensor], sources: list[tf.Tensor | None], result_grads: list[tf.Tensor]
) -> list[Gradient]:
    # The handle represents its variable.
    floating = {
        i: t
        for i, t in enumerate(sources)
        if t is not None and (is_differentiable(t) or t.dtype == tf.resource)
    }
    grads: list[Gradient] = [None] * len(sources)
    if results and floating:
        computed = tf.gradients(results, list(floating.values()), result_grads)
        for i, grad in zip(floating, computed, strict=True):
            grads[i] = grad
    return grads


def _grad_name(grad: Gradient) -> GradName:
    if isinstance(grad, tf.IndexedSlices):
        return grad.values.name, grad.indices.name
    return None if grad is None else grad.name


def flat_names(names: Iterable[GradName | tuple[str, ...]]) -> list[str]:
    """Returns the names of all tensors; a sparse gradient has two, a missing one none."""
    flat: list[str] = []
    for name in names:
        if name is not None:
            flat.extend([name] if isinstance(name, str) else name)
    return flat


@dataclasses.dataclass(frozen=True)
class Summaries:
    """The TF1 summaries of one stage, passed on in its carry; each microbatch adds its own."""

    before: tf.Tensor  # of earlier microbatches and replicas
    after: tf.Tensor  # with those of this microbatch
    collections: Sequence[str]  # of the outer graph, which get it

    @classmethod
    def found(cls, begin: int, earlier: Summaries | None) -> Summaries | None:
        """Returns the summaries among the operations of the graph being traced, without the first
        ones.

        None if there are none, or outside of a TF1 graph, where nothing collects them, as in a
        plain model.
        """
        graph: Any = tf.compat.v1.get_default_graph()
        if graph.outer_graph.building_function:
            return None
        made = [op.outputs[0] for op in graph.get_operations()[begin:] if op.type in SUMMARIES]
        if not made:
            return None
        if earlier is None:
            before = tf.compat.v1.placeholder(tf.string, [])
        else:
            before = tf.identity(earlier.after)
        names = {tensor.name for tensor in made}
        collections = [
            key
            for key in graph.get_all_collection_keys()
            if any(
                isinstance(item, tf.Tensor) and item.graph is graph and item.name in names
                for item in graph.get_collection(key)
            )
        ]
        return cls(before, tf.raw_ops.MergeSummary(inputs=[before, *made]), collections)

    def collect(self, merged: tf.Tensor) -> None:
        """Adds the summaries of all microbatches to the collections of the current graph."""
        for key in self.collections:
            tf.compat.v1.add_to_collection(key, merged)


@dataclasses.dataclass
class Replica:
    """The part of a traced graph that computes the rows of one replica."""

    device: str  # the first of the replica
    number: int | None  # None if it is the only one
    # Placeholders of its arguments.
    theta: list[tf.Tensor]
    carry: list[tf.Tensor]  # from the previous microbatch or replica
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor]
    carry_out: list[tf.Tensor]
    spans: Sequence[LayerSpan]  # the operations of its layers
    replay: Replay  # draws the random numbers of its forward pass again
    probes: StageProbes
    summaries: Summaries | None
    operations: list[tuple[int, int]]  # ranges in the graph, ends excluded
    # its own placeholders for captured weights, by the shared ones; empty in the first
    copies: dict[str, str] = dataclasses.field(default_factory=dict)
    # of theta, of the inputs, and of the carry, if it has several
    devices: tuple[list[str], list[str], list[str]] | None = None

    @property
    def carried(self) -> list[tf.Tensor]:
        """Returns the carry without summaries."""
        return self.carry if self.summaries is None else self.carry[:-1]

    @property
    def handed_on(self) -> list[tf.Tensor]:
        """Returns the carry for the next microbatch or replica, without summaries."""
        return self.carry_out if self.summaries is None else self.carry_out[:-1]

    def copy_captured(self, graph: tf.Graph, captured: Sequence[Captured]) -> None:
        """Gives the replica its own placeholders for captured weights."""
        with graph.as_default():
            for weight in captured:
                value = graph.get_tensor_by_name(weight.name)
                copy = tf.compat.v1.placeholder(value.dtype, value.shape)
                self.copies[weight.name] = copy.name

    def differentiate(
        self,
        graph: tf.Graph,
        stage: Stage,
        captured: Sequence[Captured],
        live: Iterable[int],  # the outputs of a replica with an incoming gradient
        first_output: int,  # number of outputs of earlier replicas
        first_carry: int,  # number of tensors that earlier replicas carry to later slices
        frozen: Container[int],  # indices of theta that get no gradient
        to_inputs: bool,  # whether inputs get a gradient
    ) -> StageGradients:
        """Adds the gradient of the replica to the graph."""
        begin = len(graph.get_operations())
        with (
            graph.as_default(),
            replica_scope(stage.name, self.device, self.number),
            self.replay.enter(self.replay.tensors),
            gradient_scope(),
        ):
            theta = [
                # The gradient of a copy is that of its original.
                *(
                    None if i in stage.copies or i in frozen else t
                    for i, t in enumerate(self.theta)
                ),
                *(weight.source for weight in captured),
            ]
            inputs = self.inputs if to_inputs else [None] * len(self.inputs)
            of_outputs = _grad_placeholders({first_output + i: self.outputs[i] for i in live})
            states = self.carried if stage.recurrent else []
            handed_on = self.handed_on if stage.recurrent else []
            of_carry_out = _grad_placeholders(dict(enumerate(handed_on, first_carry)))
            grads = _gradients(
                [
                    *(self.outputs[i - first_output] for i in of_outputs),
                    *(self.carry_out[i - first_carry] for i in of_carry_out),
                ],
                [*theta, *inputs, *states, *self.probes.sources],
                [*of_outputs.values(), *of_carry_out.values()],
            )
            if self.devices is not None:
                firsts = (0, len(theta), len(theta) + len(inputs))
                for first, devices in zip(firsts, self.devices, strict=True):
                    for i, device in enumerate(devices if first < len(grads) else (), first):
                        grad = grads[i]
                        # A sparse gradient is on the device of the lookup.
                        if isinstance(grad, tf.Tensor):
                            with tf.device(device):
                                grads[i] = tf.identity(grad)
            dense = [
                None if grad is None else tf.convert_to_tensor(grad).name
                for grad in grads[len(theta) :]
            ]
        self.operations.append((begin, len(graph.get_operations())))
        after = len(self.inputs) + len(states)
        self.probes.of_inputs, self.probes.gradients = dense[: len(self.inputs)], dense[after:]
        return StageGradients(
            of_outputs={i: t.name for i, t in of_outputs.items()},
            of_carry_out={i: t.name for i, t in of_carry_out.items()},
            of_theta=[_grad_name(grad) for grad in grads[: len(theta)]],
            of_inputs=self.probes.of_inputs,
            of_carry=dense[len(self.inputs) : after],
        )


@contextlib.contextmanager
def replica_scope(stage: str, device: str, number: int | None) -> Iterator[None]:
    """Places operations on a device, with stage and replica in their names."""
    with contextlib.ExitStack() as scopes:
        scopes.enter_context(tf.device(device))
        scopes.enter_context(label_scope("stage", stage))
        if number is not None:
            scopes.enter_context(label_scope("replica", str(number)))
        yield


def joined(parts: Sequence[StageGradients]) -> StageGradients:
    """Returns the gradients of all replicas in one list."""
    return StageGradients(
        of_outputs={i: name for part in parts for i, name in part.of_outputs.items()},
        of_carry_out={i: name for part in parts for i, name in part.of_carry_out.items()},
        of_theta=[name for part in parts for name in part.of_theta],
        of_inputs=[name for part in parts for name in part.of_inputs],
        of_carry=[name for part in parts for name in part.of_carry],
    )


def check_apart(
    graph: tf.Graph, replicas: Sequence[Replica], microbatch: tf.Tensor, what: str
) -> None:
    """Checks that no replica uses a tensor of another one, except the carry.

    Python code that keeps a tensor from one call to the next mixes replicas: one computes with the
    rows or the weight copies of another, and gradients are lost. A tensor that depends on no row,
    weight or microbatch is the same for all replicas and may be kept.
    """
    operations = graph.get_operations()
    owners = {
        tensor.op: number
        for number, replica in enumerate(replicas)
        for tensor in [*replica.theta, *replica.carry, *replica.inputs]
    }
    captured = {inner.op for _, inner in graph.captures}
    parts = sorted(
        (begin, end, number)
        for number, replica in enumerate(replicas)
        for begin, end in replica.operations
    )
    for begin, end, number in parts:
        for operation in operations[begin:end]:
            if operation in owners:
                continue
            # An incoming gradient belongs to its replica; a captured tensor is the same for all.
            is_own = operation.type == "Placeholder" and operation not in captured
            for tensor in operation.inputs:
                owner = owners.get(tensor.op)
                if owner not in (None, number):
                    raise PipelineError(_uses_other(what, operation, number, tensor, owner))
                is_own |= owner is not None or tensor is microbatch
            if is_own:
                owners[operation] = number


def _uses_other(
    what: str, user: tf.Operation, number: int, used: tf.Tensor, owner: int | None
) -> str:
    layer = labelled("layer", user.name)
    where = f" in layer {layer!r}" if layer is not None else ""
    return (
        f"{what} has replicas, and its operation {user.name!r} ({user.type}){where} of replica "
        f"{number} uses {used.op.name!r} ({used.op.type}), which replica {owner} has computed with "
        "its own rows and weights; the code of the stage must keep no tensor in Python (an "
        "attribute, a list, a cache) from one call to the next: compute it in each call, or hand "
        "it on in the carry"
    )


@dataclasses.dataclass(frozen=True)
class Trace:
    """The result of tracing a stage."""

    function: Any  # keeps the functions inside its graph alive
    replicas: list[Replica]  # one for each call of the stage
    drawn: dict[str, WholeDraw]  # the random draws of the last call


def trace(
    stage: Stage,
    inputs: Specs,  # of each call
    has_step: bool,
    num_replicas: int = 1,
    # of a call's rows in the batch; None for all
    position: Callable[[tf.Tensor], Position] | None = None,
    num_slices: int = 1,
    span: Span | None = None,  # the slice that the trace is for, if slices differ in length
) -> Trace:
    """Traces the forward pass of a stage, once per replica.

    The carry goes from call to call; in a recurrent stage each replica has its own.
    """
    replicas: list[Replica] = []
    drawn: dict[str, WholeDraw] = {}
    scalar = tf.TensorSpec([], tf.int64)

    def call(number: int, theta: Any, carry: Any, inputs: Any, piece: Any, step: Any) -> Replica:
        begin = len(tf.compat.v1.get_default_graph().get_operations())
        microbatch, slice_index = piece, None
        if num_slices > 1:
            slice_index = tf.math.floormod(piece, num_slices)
            microbatch = tf.math.floordiv(piece, num_slices)
        replica = number if num_replicas > 1 else None
        part = microbatch if replica is None else microbatch * num_replicas + number
        where = position(part) if position else None
        if where is not None:
            where = dataclasses.replace(where, slice=slice_index)
        with plan_free_randomness(step, where) as draws:
            with contextlib.ExitStack() as tags:
                if where is not None and where.num_microbatches * num_slices > 1:
                    tags.enter_context(tagged(stage.name, microbatch, replica, slice_index))
                if slice_index is not None:
                    is_piece = where is not None
                    tags.enter_context(calling_for(slice_index, num_slices, is_piece, span))
                outputs, carry_out = stage.forward(theta, carry, inputs, part, step)
            drawn.update(draws)
            # An output that is an input, or a tensor returned twice, gets its own name.
            outputs = [identity_beside(t) for t in outputs]
            carry_out = [(tf.identity if span is None else identity_beside)(t) for t in carry_out]
            summaries = Summaries.found(begin, replicas[-1].summaries if replicas else None)
            if summaries is not None:
                carry, carry_out = [*carry, summaries.before], [*carry_out, summaries.after]
            spans = layer_spans()
            return Replica(
                device=stage.of_home.replica(number)[0],
                number=replica,
                theta=theta,
                carry=carry,
                inputs=inputs,
                outputs=outputs,
                carry_out=carry_out,
                spans=spans,
                replay=Replay(),
                probes=StageProbes(spans, theta, inputs, outputs),
                summaries=summaries,
                operations=[(begin, len(tf.compat.v1.get_default_graph().get_operations()))],
            )

    def run(thetas: Any, carries: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        step = step if has_step else None
        carry = carries[0]
        for number, (theta, own) in enumerate(zip(thetas, inputs, strict=True)):
            devices = stage.of_home.replica(number)
            replica = number if num_replicas > 1 else None
            if stage.recurrent:
                carry = carries[number]
            with replica_scope(stage.name, devices[0], replica), calling_on(devices):
                replicas.append(call(number, theta, carry, own, microbatch, step))
                # No gradient flows through it, as between microbatches.
                if not stage.recurrent:
                    carried = replicas[-1].carry_out[: len(stage.carry)]
                    carry = [tf.stop_gradient(t) for t in carried]
        _check_alike(stage.name, replicas)
        return [[*replica.outputs, *replica.carry_out] for replica in replicas]

    function = tf.function(run, autograph=False).get_concrete_function(
        [specs_of(stage.theta)] * num_replicas,
        [specs_of(stage.carry)] * (num_replicas if stage.recurrent else 1),
        [inputs] * num_replicas,
        scalar,
        scalar,
    )
    return Trace(function, replicas, drawn)


def _check_alike(stage: str, replicas: Sequence[Replica]) -> None:
    """Checks that all replicas return tensors of the same shapes and dtypes."""
    first, *others = [specs_of([*r.outputs, *r.carry_out]) for r in replicas]
    for number, specs in enumerate(others, 1):
        if specs != first:
            raise PipelineError(
                f"stage {stage!r} has replicas, which are calls of one function, and gives "
                f"{_text(first)} in replica 0, but {_text(specs)} in replica {number}; it must not "
                "depend on what it was called with before"
            )


def _text(specs: Specs) -> str:
    return ", ".join(f"{spec.dtype.name}{spec.shape}" for spec in specs) or "nothing"


def whole_draws(
    stages: Sequence[Stage], inputs: Specs, has_step: bool, cutting: Cutting
) -> Iterator[WholeDraws]:
    """Yields all random draws of each stage, which is then traced with the whole batch.

    It is needed where the dims of a draw have no names. Only the random draws and the position of
    the batch dim in them are used. With slices, two traces distinguish the two dims along which
    draws are split: one has the whole batch and a slice, the other a part of the batch and whole
    sequences.
    """
    specs = [cutting.of_part(spec, batch=False) for spec in inputs]
    of_sequences = [cutting.of_part(spec, sequences=False) for spec in inputs]
    num_examples = static_sizes(specs[0])[cutting.batch_dim]
    labels = functools.partial(labels_of_batch, specs, cutting.batch_dim)
    # Traces keep the functions inside their graphs alive.
    traces: list[Trace] = []
    for stage in stages:
        traces.append(traced := _trace_whole(stage, specs, has_step, cutting))
        names, outputs = [t.name for t in traced.replicas[0].inputs], traced.replicas[0].outputs
        draws = DrawsOfStage(
            traced.function.graph,
            traced.drawn,
            lambda names=names, labels=labels: dict(zip(names, labels(), strict=True)),
            num_examples,
        )
        specs, labels = specs_of(outputs), functools.partial(draws.labels, outputs)
        whole = draws.whole
        if cutting.num_slices > 1:
            traces.append(traced := trace(stage, of_sequences, has_step))
            of_sequences = specs_of(traced.replicas[0].outputs)
            whole = dataclasses.replace(whole, of_sequences=traced.drawn)
        yield whole


def _trace_whole(stage: Stage, specs: Specs, has_step: bool, cutting: Cutting) -> Trace:
    """Returns the trace of a stage with a slice of the whole batch, if there are slices."""
    errors: list[Exception] = []
    for variant in cutting.for_whole_batch(stage):
        try:
            count, span = cutting.num_slices, cutting.span
            return trace(variant, specs, has_step, num_slices=count, span=span)
        except PipelineError:
            raise
        except (ValueError, TypeError) as error:
            errors.append(error)
    if cutting.num_slices == 1:
        raise errors[0]
    raise PipelineError(
        f"stage {stage.name!r} draws random numbers, for which it is also called with a slice "
        "of the whole batch, and cannot be: its carry has rows for a microbatch, and along "
        f"which dim does not show ({_text(specs_of(stage.carry))}, of "
        f"{cutting.part_size} examples); let them come first, or along the batch's dim "
        "of the inputs"
    ) from errors[0]
