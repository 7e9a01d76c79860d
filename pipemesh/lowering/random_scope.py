"""The scopes that say what random numbers belong to: step, layer, loop, and part of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Iterator, Mapping

import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.lowering.labels import label_scope


class NeedWholeShapes(Exception):
    """A microbatch draws random numbers, but the whole batch's shapes are not known yet."""


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a microbatch lies in the whole batch.

    Attributes:
        microbatch: int64 scalar, the index of the microbatch.
        num_microbatches: how many microbatches the whole batch has.
        microbatch_size: how many examples a microbatch has.
        batch_dim: the dim along which the inputs of the pipeline are cut.
        whole_shapes: the shape of every draw of the stage for the whole batch, in order; None if
            not known yet (then a draw raises `NeedWholeShapes`).
    """

    microbatch: tf.Tensor
    num_microbatches: int
    microbatch_size: int
    batch_dim: int
    whole_shapes: tuple[tuple[int, ...], ...] | None


@dataclasses.dataclass(frozen=True)
class LayerSpan:
    """The operations that a layer has added to its graph.

    Attributes:
        layer: name of the layer.
        begin: number of operations before it.
        end: number of operations after it.
    """

    layer: str
    begin: int
    end: int


@dataclasses.dataclass
class Scope:
    """What `plan_free_randomness` was entered with, and what has been drawn inside."""

    step: tf.Tensor | None
    position: Position | None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layer: str = ""
    iterations: tuple[tf.Tensor, ...] = ()
    draws_in_layer: dict[str, int] = dataclasses.field(default_factory=dict)
    shapes: list[tuple[int, ...]] = dataclasses.field(default_factory=list)
    spans: list[LayerSpan] = dataclasses.field(default_factory=list)


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []


scopes = _Scopes()
"""The scopes that are entered in this thread."""


@contextlib.contextmanager
def layer_aliases(aliases: Mapping[str, str]) -> Iterator[None]:
    """Gives layers inside other names, where two layers of a stack share one."""
    scope = scopes.stack[-1]
    saved, scope.aliases = scope.aliases, aliases
    try:
        yield
    finally:
        scope.aliases = saved


@contextlib.contextmanager
def layer_scope(name: str) -> Iterator[None]:
    """Draws inside belong to layer `name`; scopes nest. Does nothing outside randomness."""
    if not scopes.stack:
        yield
        return
    scope = scopes.stack[-1]
    saved = scope.layer
    scope.layer = f"{saved}/{name}" if saved else scope.aliases.get(name, name)
    begin = _num_operations()
    try:
        with contextlib.nullcontext() if saved else label_scope("layer", scope.layer):
            yield
    finally:
        if not saved:
            scope.spans.append(LayerSpan(scope.layer, begin, _num_operations()))
        scope.layer = saved


def layer_spans() -> list[LayerSpan]:
    """What the outermost layer scopes of this randomness have added to the graph, in order."""
    return list(scopes.stack[-1].spans)


def _num_operations() -> int:
    return 0 if tf.executing_eagerly() else len(tf.compat.v1.get_default_graph().get_operations())


@contextlib.contextmanager
def loop_scope(iteration: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Draws inside depend on the iteration (int64 scalar) of a loop, and on which loop it is.

    To be entered once, where the loop's body is traced; yields the tensors from outside of it that
    draws depend on. Does nothing outside randomness.
    """
    if not scopes.stack:
        yield []
        return
    scope = scopes.stack[-1]
    saved = (scope.layer, scope.iterations)
    outside = [scope.step, scope.position and scope.position.microbatch, *scope.iterations]
    scope.layer = f"{scope.layer}/loop{_next_number(scope)}"
    scope.iterations = (*scope.iterations, iteration)
    try:
        yield [tensor for tensor in outside if tensor is not None]
    finally:
        scope.layer, scope.iterations = saved


def is_active() -> bool:
    """Whether a `plan_free_randomness` context is entered in this thread."""
    return bool(scopes.stack)


def draw_seed() -> tf.Tensor:
    """An int64 seed pair (global step, layer and draw) for one stateless operation.

    Raises:
        PipelineError: there is no global step.
    """
    scope = scopes.stack[-1]
    if scope.step is None:
        raise PipelineError(
            f"layer {scope.layer!r} draws random numbers, which are keyed by the global step, but "
            "there is none; create it with py_utils.GetOrCreateGlobalStepVar() first"
        )
    key = tf.constant(_hash(f"{scope.layer}:{_next_number(scope)}"), tf.int64)
    for depth, iteration in enumerate(scope.iterations):
        # Odd, so that all iterations differ; one for each loop, so that all pairs do.
        key += iteration * (_hash(f"loop {depth}") | 1)
    return tf.stack([tf.cast(scope.step, tf.int64), key])


def _next_number(scope: Scope) -> int:
    """How many draws and loops the layer had before."""
    number = scope.draws_in_layer.get(scope.layer, 0)
    scope.draws_in_layer[scope.layer] = number + 1
    return number


def _hash(text: str) -> int:
    """63 bits that are the same in every process."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:16], 16) >> 1
