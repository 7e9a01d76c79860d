"""Traces calls of a stage's Python function into one graph."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.labels import tagged
from pipemesh.backend.static_shape import static_sizes
from pipemesh.errors import PipelineError
from pipemesh.randomness import plan_free_randomness
from pipemesh.randomness.example_flow import DrawsOfStage, labels_of_batch
from pipemesh.randomness.scope import Position, Replay, WholeDraw, WholeDraws, layer_spans
from pipemesh.recurrent.passes.pieces import Cutting
from pipemesh.recurrent.passes.replica import Replica, Summaries, replica_scope
from pipemesh.recurrent.stage import Stage, calling_for, calling_on
from pipemesh.recurrent.watch.finite_values import StageProbes


def detached(tensors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
    """Returns the tensors without gradients, pinned so that each stays on its device."""
    results = []
    for tensor in tensors:
        with tf.device(tensor.device):
            results.append(tf.stop_gradient(tensor))
    return results


def identity_beside(tensor: tf.Tensor) -> tf.Tensor:
    """Returns a copy of a tensor on its own device; without one, on the device of the scope."""
    with tf.device(tensor.device):
        return tf.identity(tensor)


Specs = list[tf.TensorSpec]


def specs_of(tensors: Sequence[tf.Tensor]) -> Specs:
    """Returns the shape and dtype of each tensor."""
    return [tf.TensorSpec(t.shape, t.dtype) for t in tensors]


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
) -> Trace:
    """Traces the forward pass of a stage, once per replica; the carry goes from call to call."""
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
                    tags.enter_context(calling_for(slice_index, num_slices, where is not None))
                outputs, carry_out = stage.forward(theta, carry, inputs, part, step)
            drawn.update(draws)
            # An output that is an input, or a tensor returned twice, gets its own name.
            outputs = [identity_beside(t) for t in outputs]
            carry_out = [tf.identity(t) for t in carry_out]
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

    def run(thetas: Any, carry: Any, inputs: Any, microbatch: Any, step: Any) -> Any:
        step = step if has_step else None
        for number, (theta, own) in enumerate(zip(thetas, inputs, strict=True)):
            devices = stage.of_home.replica(number)
            replica = number if num_replicas > 1 else None
            with replica_scope(stage.name, devices[0], replica), calling_on(devices):
                replicas.append(call(number, theta, carry, own, microbatch, step))
                # No gradient flows through it, as between microbatches.
                carry = [tf.stop_gradient(t) for t in replicas[-1].carry_out[: len(stage.carry)]]
        _check_alike(stage.name, replicas)
        return [replica.outputs for replica in replicas], replicas[-1].carry_out

    function = tf.function(run, autograph=False).get_concrete_function(
        [specs_of(stage.theta)] * num_replicas,
        specs_of(stage.carry),
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

    Only the random draws and the position of the batch dim in them are used. With slices, two
    traces distinguish the two dims along which draws are split: one has the whole batch and a
    slice, the other a part of the batch and whole sequences.
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
            return trace(variant, specs, has_step, num_slices=cutting.num_slices)
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
