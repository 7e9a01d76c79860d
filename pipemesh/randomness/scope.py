"""The scopes that key random numbers: step, layer, loop, and part of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from pipemesh.backend.graphs import is_in_old_loop, loop_counter, surrounding_graphs
from pipemesh.backend.labels import label_scope
from pipemesh.errors import LayoutError, PipelineError


class NeedWholeDraws(Exception):
    """A microbatch draws random numbers, but what the whole batch draws is not known yet."""


@dataclasses.dataclass(frozen=True)
class WholeDraw:
    """A draw of the whole batch.

    Attributes:
        sizes: of the whole tensor.
        parts: the tensors in a graph that it consists of, each with the place of its first element.
    """

    sizes: tuple[int, ...]
    parts: tuple[tuple[tf.Tensor, tuple[int, ...]], ...] = ()


@dataclasses.dataclass(frozen=True)
class WholeDraws:
    """What a stage draws for the whole batch.

    Attributes:
        of: the draws by name: the layer, and which of its draws it is.
        before: tells of the draw `name`, in whose dim `dim` other dims are folded into the
            batch's, how many of their elements come before the batch; the others, of `folded` in
            all, come behind. It raises a PipelineError if that is not known.
        of_sequences: where sequences are cut into slices, the draws for a microbatch's whole
            sequences; those in `of` are then for a slice of each of the whole batch's.
    """

    of: Mapping[str, WholeDraw]
    before: Callable[[str, int, int], int]
    of_sequences: Mapping[str, WholeDraw] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Position:
    """Where a microbatch lies in the whole batch.

    Attributes:
        microbatch: int64 scalar, the index of the microbatch.
        num_microbatches: how many microbatches the whole batch has.
        microbatch_size: how many examples a microbatch has.
        whole: what the stage draws for the whole batch; None if that is not known yet (then a
            draw raises `NeedWholeDraws`).
        num_slices: into how many slices its sequences are cut.
        slice_size: how many positions each has.
        slice: int64 scalar, the index of one of them; None for whole sequences.
    """

    microbatch: tf.Tensor
    num_microbatches: int
    microbatch_size: int
    whole: WholeDraws | None
    num_slices: int = 1
    slice_size: int = 0
    slice: tf.Tensor | None = None


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


class Numbers(NamedTuple):
    """How many keys and draws each layer had: all that tracing a function changes in a scope."""

    keys: dict[str, int]
    draws: dict[str, int]

    def copied(self) -> Numbers:
        """The same numbers, which go on by themselves."""
        return Numbers(dict(self.keys), dict(self.draws))


@dataclasses.dataclass
class Scope:
    """What `plan_free_randomness` was entered with, and what has been drawn inside."""

    step: tf.Tensor | None
    position: Position | None
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    stack: str = ""
    layer: str = ""
    # The names of the layers that a call stands for, where it is one of several.
    alike: tuple[str, ...] = ()
    iterations: tuple[tf.Tensor, ...] = ()
    # Of the eager `tf.while_loop`s that run, how often each has turned.
    turns: tuple[int, ...] = ()
    numbers: Numbers = dataclasses.field(default_factory=lambda: Numbers({}, {}))
    drawn: dict[str, WholeDraw] = dataclasses.field(default_factory=dict)
    spans: list[LayerSpan] = dataclasses.field(default_factory=list)
    # What computes a gradient may only draw what was drawn before.
    is_gradient: bool = False
    graph: Any = dataclasses.field(
        default_factory=lambda: None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    )


@dataclasses.dataclass(frozen=True)
class Slicewise:
    """Inside, each processor computes with a slice of its own.

    Attributes:
        refusal: why an operation of TensorFlow may not draw here.
        draw: draws a tensor with named dims, `draw(shape, seed, dtype, raw)`; None if none can be.
    """

    refusal: str
    draw: Callable[..., Any] | None = None


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope] = []
        self.slicewise: list[Slicewise] = []
        # Calls of functions that are being traced, see `retracing`.
        self.calls: list[Any] = []


scopes = _Scopes()
"""The scopes that are entered in this thread."""


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
def layer_aliases(aliases: Mapping[str, str], stack: str | None = None) -> Iterator[None]:
    """Gives layers inside other names, where two layers of a stack share one.

    Args:
        aliases: the names.
        stack: name of the stack itself, which tells layers of one name in two stacks apart; None
            leaves it as it is.
    """
    scope = scopes.stack[-1]
    saved = scope.aliases, scope.stack
    scope.aliases, scope.stack = aliases, scope.stack if stack is None else stack
    try:
        yield
    finally:
        scope.aliases, scope.stack = saved


@contextlib.contextmanager
def layer_scope(name: str) -> Iterator[None]:
    """Draws inside belong to a layer. Does nothing outside of `plan_free_randomness`.

    Args:
        name: of the layer; scopes nest, and their names are joined by `/`.

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
    saved = scope.layer
    scope.layer = f"{saved}/{name}" if saved else scope.aliases.get(name, name)
    begin = _num_operations(scope)
    try:
        with contextlib.nullcontext() if saved else label_scope("layer", scope.layer):
            yield
    finally:
        if not saved and _num_operations(scope) is not None:
            scope.spans.append(LayerSpan(scope.layer, begin or 0, _num_operations(scope) or 0))
        scope.layer = saved


@contextlib.contextmanager
def alike_layers_scope(names: Sequence[str]) -> Iterator[None]:
    """Draws inside belong to several layers at once, of which each processor computes another.

    `draw_seed` returns a row for each: what it would return in the `layer_scope` of its name.

    Args:
        names: of the layers, the outermost ones of their scopes.

    Example:
        >>> import tensorflow as tf
        >>> from pipemesh.randomness import draw_seed, layer_scope, plan_free_randomness
        >>> with plan_free_randomness(tf.constant(7, tf.int64)), alike_layers_scope(["a", "b"]):
        ...     rows = draw_seed()
        >>> with plan_free_randomness(tf.constant(7, tf.int64)), layer_scope("b"):
        ...     bool(tf.reduce_all(draw_seed() == rows[1]))
        True
    """
    scope = scopes.stack[-1]
    with layer_scope(names[0]):
        scope.alike = tuple(scope.aliases.get(name, name) for name in names)
        try:
            yield
        finally:
            scope.alike = ()


def layer_spans() -> list[LayerSpan]:
    """What the outermost layer scopes of this randomness have added to the graph, in order."""
    return list(scopes.stack[-1].spans)


def _num_operations(scope: Scope) -> int | None:
    """How many operations the graph of the scope has; None inside of a function of its own."""
    if tf.executing_eagerly():
        return 0
    graph = tf.compat.v1.get_default_graph()
    return len(graph.get_operations()) if graph is scope.graph else None


@contextlib.contextmanager
def loop_scope(iteration: tf.Tensor) -> Iterator[list[tf.Tensor]]:
    """Draws inside depend on the iteration of a loop, and on which loop it is.

    To be entered once, where the loop's body is traced. Does nothing outside randomness.

    Args:
        iteration: int64 scalar.

    Yields:
        The tensors from outside of the body that draws depend on.
    """
    if not scopes.stack:
        yield []
        return
    scope = scopes.stack[-1]
    saved = (scope.layer, scope.iterations)
    outside = tensors_of(scope)
    scope.layer = f"{scope.layer}/loop{_next_number(scope)}"
    scope.iterations = (*scope.iterations, iteration)
    try:
        yield outside
    finally:
        scope.layer, scope.iterations = saved


@contextlib.contextmanager
def gradient_scope() -> Iterator[None]:
    """Inside, gradients are computed: nothing may be drawn but what a `Replay` draws again."""
    if not scopes.stack:
        yield
        return
    scope = scopes.stack[-1]
    scope.is_gradient = True
    try:
        yield
    finally:
        scope.is_gradient = False


def tensors_of(scope: Scope) -> list[tf.Tensor]:
    """The tensors that draws in a scope depend on."""
    step = None if scope.step is None else known_step(scope)
    position = scope.position
    parts = () if position is None else (position.microbatch, position.slice)
    return [t for t in (step, *parts, *scope.iterations) if t is not None]


def is_active() -> bool:
    """Whether `plan_free_randomness` is entered in this thread."""
    return bool(scopes.stack)


def loop_counters() -> list[tf.Tensor]:
    """The iterations of the `tf.while_loop`s whose bodies draw, the innermost last.

    Raises:
        PipelineError: it is a loop of TF1's old kind.
    """
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
            f"layer {scope.layer!r} draws random numbers in a tf.while_loop of TF1's old kind, of "
            "which all iterations would draw the same; call "
            "tf.compat.v1.enable_control_flow_v2() before the graph is built"
        )
    return [*turns, *counters]


def known_step(scope: Scope) -> tf.Tensor:
    """The step; inside a function that is traced by an eager call, that of each call of it."""
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
    """An int64 seed pair (global step, layer and draw) for one stateless operation.

    In an `alike_layers_scope` there is a row with such a pair for each of its layers.

    Raises:
        PipelineError: there is no global step.
    """
    scope = scopes.stack[-1]
    if scope.step is None and scope.is_gradient:
        # Only single numbers are drawn there, by which nothing is computed.
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
        # Odd, so that all iterations differ; one for each loop, so that all pairs do.
        key += iteration * (_hash(f"loop {depth}") | 1)
    step = tf.cast(known_step(scope), tf.int64)
    if not scope.alike:
        return tf.stack([step, key])
    return tf.stack([tf.fill([len(layers)], step), key], axis=1)


def _next_number(scope: Scope) -> int:
    """How many draws and loops the layer had before."""
    return _count(scope.numbers.keys, scope.layer)


def next_draw(scope: Scope) -> str:
    """A name for a draw, the same for the whole batch and for each microbatch."""
    return f"{scope.layer}:{_count(scope.numbers.draws, scope.layer)}"


def _count(numbers: dict[str, int], key: str) -> int:
    numbers[key] = numbers.get(key, 0) + 1
    return numbers[key] - 1


def _hash(text: str) -> int:
    """63 bits that are the same in every process."""
    return int(hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()[:16], 16) >> 1


class Replay:
    """Remembers the scope of now, if there is one, and which numbers come next in it.

    What is computed inside of `enter`, once for a result and once more for its gradient, draws the
    same numbers each time.

    Attributes:
        tensors: what draws depend on; a function that may capture nothing takes them as arguments.
    """

    def __init__(self) -> None:
        self._scope = scopes.stack[-1] if scopes.stack else None
        self.tensors: list[tf.Tensor] = []
        if self._scope is not None:
            self._state = dataclasses.replace(
                self._scope, numbers=self._scope.numbers.copied(), is_gradient=False
            )
            self.tensors = tensors_of(self._state)

    @contextlib.contextmanager
    def enter(self, tensors: Sequence[tf.Tensor]) -> Iterator[None]:
        """Enters the scope in its remembered state.

        Args:
            tensors: takes the place of the attribute.
        """
        scope = self._scope
        if scope is None:
            yield
            return
        again = _with_tensors(self._state, tensors)
        again.numbers = self._state.numbers.copied()
        scopes.stack.append(again)
        try:
            yield
        finally:
            scopes.stack.pop()
            for mine, theirs in zip(scope.numbers, again.numbers, strict=True):
                mine.update({key: max(n, mine.get(key, 0)) for key, n in theirs.items()})


def _with_tensors(scope: Scope, tensors: Sequence[tf.Tensor]) -> Scope:
    """The same scope with others in the place of `tensors_of`."""
    given = iter(tensors)
    step = None if scope.step is None else next(given)
    position = scope.position
    if position is not None:
        position = dataclasses.replace(position, microbatch=next(given))
        if position.slice is not None:
            position = dataclasses.replace(position, slice=next(given))
    return dataclasses.replace(scope, step=step, position=position, iterations=tuple(given))
