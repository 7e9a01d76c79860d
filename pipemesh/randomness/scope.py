"""The scopes that key random numbers: step, layer, loop, and part of the batch."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.graphs import is_in_old_loop, loop_counter, surrounding_graphs
from pipemesh.backend.labels import label_scope
from pipemesh.errors import LayoutError, PipelineError
from pipemesh.plan.slices import Span


class NeedWholeDraws(Exception):
    """A microbatch draws random numbers before the draws of the whole batch are known."""


@dataclasses.dataclass(frozen=True)
class WholeDraw:
    """A draw of the whole batch: its sizes, and its tensors, each with its first index."""

    sizes: tuple[int, ...]
    parts: tuple[tuple[tf.Tensor, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class WholeDraws:
    """The draws of a stage for the whole batch."""

    # By name: the layer, and the number of its draw.
    by_name: Mapping[str, WholeDraw]
    # Takes name, batch dim and the number of elements folded into it; returns how many of these
    # come before the batch, the others come behind. Raises a PipelineError if that is unknown.
    before: Callable[[str, int, int], int]
    # If sequences are sliced, the draws for a microbatch's whole sequences; those in `by_name` are
    # then for a slice of each of the whole batch's.
    of_sequences: Mapping[str, WholeDraw] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Position:
    """The position of a microbatch in the whole batch."""

    # int64 scalar, the index of the microbatch.
    microbatch: tf.Tensor
    num_microbatches: int
    # The number of examples.
    microbatch_size: int
    # None if unknown yet: then a draw raises `NeedWholeDraws`.
    whole: WholeDraws | None
    num_slices: int = 1
    # The number of sequence positions of a slice.
    slice_size: int = 0
    # int64 scalar, the index of the slice; None for whole sequences.
    slice: tf.Tensor | None = None
    # The slice's positions, if slices differ in length.
    span: Span | None = None

    @property
    def begin(self) -> tf.Tensor:
        """The first position of the slice, an int64 scalar."""
        if self.span is not None:
            return tf.constant(self.span.begin, tf.int64)
        assert self.slice is not None
        return self.slice * self.slice_size

    @property
    def length(self) -> int:
        """The number of positions of whole sequences."""
        return self.slice_size * self.num_slices if self.span is None else self.span.whole


@dataclasses.dataclass(frozen=True)
class LayerSpan:
    """The operations that a layer has added to its graph: their numbers from `begin` to `end`."""

    layer: str
    begin: int
    end: int


# The number of keys and draws of each layer, which tracing a function changes.
Numbers = collections.Counter[tuple[str, str]]


@dataclasses.dataclass
class Scope:
    """The arguments of a `plan_free_randomness`, and the draws inside."""

    step: tf.Tensor | None
    position: Position | None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stack: str = ""
    layer: str = ""
    # The names of the layers, where one call stands for several.
    alike: tuple[str, ...] = ()
    iterations: tuple[tf.Tensor, ...] = ()
    # The iteration of each running eager `tf.while_loop`.
    turns: tuple[int, ...] = ()
    numbers: Numbers = dataclasses.field(default_factory=Numbers)
    drawn: dict[str, WholeDraw] = dataclasses.field(default_factory=dict)
    spans: list[LayerSpan] = dataclasses.field(default_factory=list)
    # Gradients may only repeat earlier draws.
    is_gradient: bool = False
    graph: Any = dataclasses.field(
        default_factory=lambda: None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    )


@dataclasses.dataclass(frozen=True)
class Slicewise:
    """A scope in which each processor computes on its own slice, and TensorFlow may not draw."""

    # Why an operation of TensorFlow may not draw here.
    refusal: str
    # Draws a tensor with named dims, `draw(shape, seed, dtype, raw)`; None if that is not
    # supported.
    draw: Callable[..., Any] | None = None


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []
        self.slicewise: list[Slicewise] = []
        # Calls of functions that are being traced; see `patch`.
        self.calls: list[Any] = []


scopes = _Scopes()
"""The scopes that this thread has entered."""


@contextlib.contextmanager
def slicewise(refusal: str, draw: Callable[..., Any] | None = None) -> Iterator[None]:
    """Enters a `Slicewise`."""
    scopes.slicewise.append(Slicewise(refusal, draw))
    try:
        yield
    finally:
        scopes.slicewise.pop()


def refuse_slicewise(operation: str) -> None:
    """Raises a LayoutError where an operation of TensorFlow must not draw random numbers."""
    if scopes.slicewise:
        raise LayoutError(f"{operation!r} {scopes.slicewise[-1].refusal}")


@contextlib.contextmanager
def _changed(**values: Any) -> Iterator[None]:
    """Changes attributes of the current scope inside."""
    scope = scopes.stack[-1]
    before = {name: getattr(scope, name) for name in values}
    vars(scope).update(values)
    try:
        yield
    finally:
        vars(scope).update(before)


@contextlib.contextmanager
def layer_aliases(aliases: Mapping[str, str], stack: str | None = None) -> Iterator[None]:
    """Renames layers inside, where two layers of a stack share a name."""
    # `stack` names the stack itself, which distinguishes equal names in two stacks; None keeps its
    # name.
    with _changed(aliases=aliases, stack=scopes.stack[-1].stack if stack is None else stack):
        yield


@contextlib.contextmanager
def layer_scope(name: str) -> Iterator[None]:
    """Makes draws inside belong to a layer; does nothing outside `plan_free_randomness`.

    Args:
        name: the layer's name; scopes nest, and their names are joined by `/`.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.randomness import layer_scope, plan_free_randomness
        >>> def drawn(name):
        ...     with plan_free_randomness(tf.constant(7, tf.int64)), layer_scope(name):
        ...         return float(tf.random.uniform([]))
        >>> drawn("a") == drawn("a"), drawn("a") == drawn("b")
        (True, False)
    """
    if not scopes.stack:
        yield
        return
    scope = scopes.stack[-1]
    if scope.layer:
        with _changed(layer=f"{scope.layer}/{name}"):
            yield
        return
    layer, begin = scope.aliases.get(name, name), _num_operations(scope)
    try:
        with _changed(layer=layer), label_scope("layer", layer):
            yield
    finally:
        if _num_operations(scope) is not None:
            scope.spans.append(LayerSpan(layer, begin or 0, _num_operations(scope) or 0))


@contextlib.contextmanager
def alike_layers_scope(names: Sequence[str]) -> Iterator[None]:
    """Makes draws inside belong to several layers at once, one on each processor."""
    # `draw_seed` then returns a row for each layer: its result in the `layer_scope` of that name.
    aliases = scopes.stack[-1].aliases
    with layer_scope(names[0]), _changed(alike=tuple(aliases.get(name, name) for name in names)):
        yield


def layer_spans() -> list[LayerSpan]:
    """Returns the spans that the outermost layer scopes have added to the graph, in order."""
    return list(scopes.stack[-1].spans)


def _num_operations(scope: Scope) -> int | None:
    """Returns the number of operations in the scope's graph, None inside an inner function."""
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    return len(graph.get_operations()) if graph is scope.graph else None


@contextlib.contextmanager
def loop_scope(iteration: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Makes draws inside depend on a loop and its iteration; does nothing outside randomness.

    Enter it once, where the loop's body is traced.

    Args:
        iteration: int64 scalar.

    Yields:
        The tensors outside the body that draws depend on.

    Example:
        >>> import tensorflow as tf
        >>> def drawn(iteration):
        ...     with plan_free_randomness(tf.constant(7, tf.int64)):
        ...         with loop_scope(tf.constant(iteration, tf.int64)):
        ...             return float(tf.random.uniform([]))
        >>> from pipemesh.randomness import plan_free_randomness
        >>> from pipemesh.randomness.scope import loop_scope
        >>> drawn(1) == drawn(1), drawn(1) == drawn(2)
        (True, False)
    """
    if not scopes.stack:
        yield []
        return
    scope = scopes.stack[-1]
    outside = tensors_of(scope)
    layer = f"{scope.layer}/loop{_next_number(scope)}"
    with _changed(layer=layer, iterations=(*scope.iterations, iteration)):
        yield outside


@contextlib.contextmanager
def gradient_scope() -> Iterator[None]:
    """Refuses draws inside, where gradients are computed, except those that a `Replay` repeats."""
    with _changed(is_gradient=True) if scopes.stack else contextlib.nullcontext():
        yield


def tensors_of(scope: Scope) -> list[tf.Tensor]:
    """Returns the tensors that draws in a scope depend on."""
    step = None if scope.step is None else known_step(scope)
    position = scope.position
    parts = () if position is None else (position.microbatch, position.slice)
    return [t for t in (step, *parts, *scope.iterations) if t is not None]


def is_active() -> bool:
    """Returns whether this thread is inside `plan_free_randomness`.

    Example:
        >>> from pipemesh.randomness.scope import is_active
        >>> is_active()
        False
    """
    return bool(scopes.stack)


def loop_counters() -> list[tf.Tensor]:
    """Returns the iterations of the enclosing `tf.while_loop`s, the innermost last."""
    scope = scopes.stack[-1]
    turns = [tf.constant(turn, tf.int64) for turn in scope.turns]
    if tf.executing_eagerly():
        return turns
    counters: list[tf.Tensor] = []
    for graph in surrounding_graphs(tf.compat.v1.get_default_graph()):
        if graph is scope.graph:
            break
        if (counter := loop_counter(graph)) is not None:
            counters.insert(0, tf.cast(counter, tf.int64))
    if is_in_old_loop():
        raise PipelineError(
            f"layer {scope.layer!r} draws random numbers in a tf.while_loop of TF1's old kind, "
            "whose iterations would all draw the same; call "
            "tf.compat.v1.enable_control_flow_v2() before the graph is built"
        )
    return [*turns, *counters]


def known_step(scope: Scope) -> tf.Tensor:
    """Returns the step, in a function traced by an eager call the step of each of its calls."""
    assert scope.step is not None
    if (
        tf.is_symbolic_tensor(scope.step)
        or tf.executing_eagerly()
        or not (scopes.calls and scopes.calls[0].is_found_again)
    ):
        return scope.step

    def call_time_step() -> tf.Tensor:
        step = scopes.stack[-1].step
        assert step is not None
        return tf.cast(step, tf.int64)

    graph: Any = tf.compat.v1.get_default_graph()
    while getattr(graph.outer_graph, "building_function", False):
        graph = graph.outer_graph
    return graph.capture_call_time_value(
        call_time_step,
        tf.TensorSpec([], tf.int64),
        key="pipemesh_step",
    )


def draw_seed() -> tf.Tensor:
    """Returns an int64 seed pair (global step, layer and draw) for one stateless operation.

    Returns:
        The pair; where one call stands for several layers, a row with a pair for each.

    Raises:
        PipelineError: there is no global step.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.randomness import draw_seed, plan_free_randomness
        >>> with plan_free_randomness(tf.constant(7, tf.int64)):
        ...     draw_seed().shape.as_list()
        [2]
    """
    scope = scopes.stack[-1]
    if scope.step is None and scope.is_gradient:
        # Gradients draw only single numbers, which nothing uses.
        return tf.zeros([2], tf.int64)
    if scope.step is None:
        raise PipelineError(
            f"layer {scope.layer!r} draws random numbers, which are keyed by the global step, but "
            "there is none; create it with py_utils.GetOrCreateGlobalStepVar() first"
        )
    layers = [scope.layer]
    if scope.alike:
        inside = scope.layer.removeprefix(scope.alike[0])
        layers = [layer + inside for layer in scope.alike]
    number = _next_number(scope)
    stack = f"{scope.stack}/" if scope.stack else ""
    hashes = [_hash(f"{stack}{layer}:{number}") for layer in layers]
    key = tf.constant(hashes if scope.alike else hashes[0], tf.int64)
    for depth, iteration in enumerate((*scope.iterations, *loop_counters())):
        # Odd, so that all iterations differ; another one for each loop, so that all pairs differ.
        key += iteration * (_hash(f"loop {depth}") | 1)
    step = tf.cast(known_step(scope), tf.int64)
    if not scope.alike:
        return tf.stack([step, key])
    return tf.stack([tf.fill([len(layers)], step), key], axis=1)


def _next_number(scope: Scope) -> int:
    """Returns the number of earlier draws and loops of the layer, and counts this one."""
    return _count(scope, "key")


def next_draw(scope: Scope) -> str:
    """Returns a name for a draw, the same for the whole batch and for each microbatch."""
    return f"{scope.layer}:{_count(scope, 'draw')}"


def _count(scope: Scope, what: str) -> int:
    scope.numbers[what, scope.layer] += 1
    return scope.numbers[what, scope.layer] - 1


def _hash(text: str) -> int:
    """Returns 63 bits that are equal in every process."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:16], 16) >> 1


class Replay:
    """A copy of the current scope, if any, that repeats its next draws."""

    # Computations inside `enter`, once for a result and once for its gradient, draw equal numbers.
    # `tensors` are those that draws depend on: a function that may not capture takes them as
    # arguments.

    def __init__(self) -> None:
        self._scope = scopes.stack[-1] if scopes.stack else None
        self.tensors: list[tf.Tensor] = []
        if self._scope is not None:
            self._state = dataclasses.replace(
                self._scope, numbers=self._scope.numbers.copy(), is_gradient=False
            )
            self.tensors = tensors_of(self._state)

    @contextlib.contextmanager
    def enter(self, tensors: Sequence[tf.Tensor]) -> Iterator[None]:
        """Enters the scope in its remembered state, with other tensors in place of `tensors`."""
        scope = self._scope
        if scope is None:
            yield
            return
        again = _with_tensors(self._state, tensors)
        again.numbers = self._state.numbers.copy()
        scopes.stack.append(again)
        try:
            yield
        finally:
            scopes.stack.pop()
            # What comes next counts the repeated draws once.
            scope.numbers |= again.numbers


def _with_tensors(scope: Scope, tensors: Sequence[tf.Tensor]) -> Scope:
    """Returns the same scope with others in place of `tensors_of`."""
    rest = iter(tensors)
    step = None if scope.step is None else next(rest)
    position = scope.position
    if position is not None:
        position = dataclasses.replace(position, microbatch=next(rest))
        if position.slice is not None:
            position = dataclasses.replace(position, slice=next(rest))
    return dataclasses.replace(scope, step=step, position=position, iterations=tuple(rest))
