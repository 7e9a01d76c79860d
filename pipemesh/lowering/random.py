"""Random numbers that do not depend on the plan.

Inside `plan_free_randomness` every random operation of TensorFlow, however it is reached
(`tf.random.*`, `tf.nn.dropout`, a lingvo or Keras layer), draws what the *whole batch* would
draw, and a microbatch gets its own slice of that draw:

* Stateless operations keep their key; only the counter moves to the slice's first element.
  Philox makes this cheap: element `i` of a 32-bit draw uses counter `i // 4` (Salmon et al.,
  "Parallel Random Numbers: As Easy as 1, 2, 3", 2011).
* Stateful operations become stateless ones. Their key is (global step, layer name, number of
  the draw within the layer, seeds given by the user).

Where the batch lies in a random tensor is not guessed: the stage is also traced with the whole
batch, and the dim whose size differs between the two traces is the batch dim.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import tensorflow as tf

# All of TensorFlow's random functions end in these generated modules. They are not public, but
# they are the one place that catches every caller; the TensorFlow version is pinned to 2.21.
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import gen_random_ops, gen_stateless_random_ops
from tensorflow.python.ops import gen_stateless_random_ops_v2 as gen_v2

from pipemesh.errors import PipelineError
from pipemesh.lowering.random_scope import (
    LayerSpan,
    NeedWholeShapes,
    Position,
    Scope,
    draw_seed,
    is_active,
    layer_aliases,
    layer_scope,
    layer_spans,
    loop_scope,
    scopes,
)

__all__ = [
    "LayerSpan",
    "NeedWholeShapes",
    "Position",
    "Share",
    "advance_counter",
    "draw_seed",
    "is_active",
    "layer_aliases",
    "layer_scope",
    "layer_spans",
    "loop_scope",
    "plan_free_randomness",
    "share_of_draw",
]

_PHILOX = 1
_AUTO = 3
# 32-bit values that one step of the Philox counter yields.
_GROUP = 4


@contextlib.contextmanager
def plan_free_randomness(
    step: tf.Tensor | None, position: Position | None = None
) -> Iterator[list[tuple[int, ...]]]:
    """Makes all random operations inside depend on step, layer and whole-batch position only.

    Args:
        step: int64 scalar, the global step; None is an error as soon as a number is drawn with
            a key that needs it.
        position: where the microbatch lies; None for the whole batch.

    Yields:
        The list of the static shapes drawn so far, which fills up inside.

    Raises:
        PipelineError: an operation is called whose numbers cannot be cut into microbatches.

    Example:
        >>> import tensorflow as tf
        >>> with plan_free_randomness(step=tf.constant(7, tf.int64)):
        ...     a = tf.nn.dropout(tf.ones([4]), rate=0.5)
        >>> with plan_free_randomness(step=tf.constant(7, tf.int64)):
        ...     b = tf.nn.dropout(tf.ones([4]), rate=0.5)
        >>> bool(tf.reduce_all(a == b))
        True
    """
    _install()
    scope = Scope(step, position)
    scopes.stack.append(scope)
    try:
        yield scope.shapes
    finally:
        scopes.stack.pop()


def _static_shape(shape: Any) -> tuple[int, ...]:
    value = tf.get_static_value(shape)
    if value is None:
        partial = tf.TensorShape(None)
        with contextlib.suppress(TypeError, ValueError):
            partial = tf.TensorShape(shape)
        raise PipelineError(
            f"layer {scopes.stack[-1].layer!r} draws random numbers of a shape that is not known "
            f"before the step runs ({partial}); give the pipeline's inputs static shapes"
        )
    return tuple(int(size) for size in value)


class Share(NamedTuple):
    """Which part of the whole batch's draw a microbatch gets.

    The microbatch's numbers, viewed as `[left, mine, right]`, are those of the whole batch, viewed
    as `[left, num_microbatches * mine, right]`, from `mine * microbatch` on in the middle.

    Attributes:
        whole: the sizes of the whole batch's draw.
        left: product of the sizes before the batch.
        mine: the examples of the microbatch, and what is folded into them.
        right: product of the sizes behind.
        position: of the microbatch.
    """

    whole: tuple[int, ...]
    left: int
    mine: int
    right: int
    position: Position


def share_of_draw(sizes: tuple[int, ...]) -> Share | None:
    """Notes a draw in the scope, and finds the part of the whole batch's draw that it is.

    To be called once for each draw, inside `plan_free_randomness`.

    Args:
        sizes: of the draw.

    Returns:
        None if the draw is that of the whole batch.

    Raises:
        NeedWholeShapes: the whole batch's shapes are not known yet.
        PipelineError: the draw cannot be cut into microbatches.
    """
    scope = scopes.stack[-1]
    position = scope.position
    number = len(scope.shapes)
    scope.shapes.append(sizes)
    if position is None or position.num_microbatches == 1:
        return None
    if position.whole_shapes is None:
        raise NeedWholeShapes
    if number >= len(position.whole_shapes):
        raise PipelineError(
            f"layer {scope.layer!r} draws more random tensors for a microbatch than for the whole "
            "batch; the number of draws must not depend on the batch size"
        )
    whole = position.whole_shapes[number]
    if whole == sizes:
        return None
    return Share(whole, *_cut(sizes, whole, position, scope.layer), position)


def _draw(
    shape: Any, key: Any, counter: Any, grouped: bool, call: Callable[[Any, Any, Any], Any]
) -> Any:
    """Draws the slice of the whole batch's numbers; `call` takes shape, key and counter."""
    if scopes.stack[-1].position is None:
        # The whole batch: exactly what TensorFlow draws, dynamic shapes included. Static ones
        # are noted for the microbatches to look up.
        value = tf.get_static_value(shape)
        share_of_draw(() if value is None else tuple(int(size) for size in value))
        return call(shape, key, counter)
    micro = _static_shape(shape)
    share = share_of_draw(micro)
    if share is None:
        return call(shape, key, counter)
    whole, left, mine, right, position = share
    block = mine * right
    if left == 1 and grouped:
        start = position.microbatch * block
        counter = advance_counter(counter, start // _GROUP)
        if block % _GROUP == 0:
            return call(shape, key, counter)
        numbers = call(tf.constant([block + _GROUP - 1]), key, counter)
        return tf.reshape(tf.slice(numbers, [start % _GROUP], [block]), micro)
    # The slice is not one run of elements: draw the whole batch's numbers and take it out.
    numbers = call(tf.constant(whole), key, counter)
    rows = tf.reshape(numbers, [left, position.num_microbatches, block])
    return tf.reshape(tf.gather(rows, position.microbatch, axis=1), micro)


def _cut(
    micro: tuple[int, ...], whole: tuple[int, ...], position: Position, layer: str
) -> tuple[int, int, int]:
    """Views the microbatch as [left, mine, right] where the whole batch is cut in the middle."""
    differing = [dim for dim, (a, b) in enumerate(zip(micro, whole, strict=False)) if a != b]
    if (
        len(micro) == len(whole)
        and len(differing) == 1
        and micro[differing[0]] * position.num_microbatches == whole[differing[0]]
    ):
        dim = differing[0]
        left, mine, right = _product(micro[:dim]), micro[dim], _product(micro[dim + 1 :])
        if position.batch_dim == 0:
            # Dims folded into the batch come after it, as in [batch, time] -> [batch * time].
            return left, mine, right
        if mine % position.microbatch_size == 0:
            # Dims folded into the batch come before it, as in [time, batch] -> [time * batch].
            return left * (mine // position.microbatch_size), position.microbatch_size, right
    raise PipelineError(
        f"layer {layer!r} draws a random tensor of shape {micro} for a microbatch and {whole} "
        "for the whole batch; one dim may differ, by the factor "
        f"{position.num_microbatches} (the number of microbatches)"
    )


def _product(sizes: tuple[int, ...]) -> int:
    result = 1
    for size in sizes:
        result *= size
    return result


def advance_counter(counter: Any, steps: Any) -> tf.Tensor:
    """The 128-bit counter `steps` (int64 scalar, not negative) further on."""
    low, high = counter[0], counter[1]
    moved = low + tf.cast(steps, tf.uint64)
    carry = tf.cast(moved < low, tf.uint64)
    return tf.stack([moved, high + carry])


def _stateless(original: Callable[..., Any], grouped_dtypes: bool) -> Callable[..., Any]:
    """Wraps `f(shape, key, counter, alg, *rest)`."""

    def dispatch(shape: Any, key: Any, counter: Any, alg: Any, *rest: Any, **kwargs: Any) -> Any:
        if not scopes.stack:
            return original(shape, key, counter, alg, *rest, **kwargs)
        # What "auto" picks may differ between devices; Philox exists on all of them.
        algorithm = _PHILOX if isinstance(alg, int) and alg == _AUTO else alg
        is_philox = isinstance(algorithm, int) and algorithm == _PHILOX
        return _draw(
            shape,
            key,
            counter,
            is_philox and grouped_dtypes and _is_32_bit(rest, kwargs),
            lambda s, k, c: original(s, k, c, algorithm, *rest, **kwargs),
        )

    return dispatch


def _is_32_bit(rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a generated number takes one 32-bit value; 64-bit types take two."""
    dtype = kwargs.get("dtype", rest[0] if rest else None)
    if dtype is None:
        dtype = kwargs["minval"]
    if not isinstance(dtype, (tf.DType, int, str)):
        dtype = tf.convert_to_tensor(dtype).dtype
    return tf.as_dtype(dtype).size <= 4


def _stateful(original: Callable[..., Any], stateless: str) -> Callable[..., Any]:
    """Wraps `f(shape, dtype or bounds, seed, seed2, name)` to the stateless operation."""

    def dispatch(shape: Any, *rest: Any, seed: int = 0, seed2: int = 0, name: Any = None) -> Any:
        if not scopes.stack:
            return original(shape, *rest, seed=seed, seed2=seed2, name=name)
        seeds = draw_seed() + tf.constant([seed or 0, seed2 or 0], tf.int64)
        key, counter = gen_v2.stateless_random_get_key_counter(seeds)
        return getattr(gen_v2, stateless)(shape, key, counter, _PHILOX, *rest, name=name)

    return dispatch


def _uncuttable(original: Callable[..., Any], stateful: bool) -> Callable[..., Any]:
    """Wraps an operation whose numbers cannot be cut into microbatches."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        position = scopes.stack[-1].position if scopes.stack else None
        if position is not None and (stateful or position.num_microbatches > 1):
            raise PipelineError(
                f"layer {scopes.stack[-1].layer!r} calls {original.__name__!r} inside a pipeline, "
                "whose numbers would depend on the number of microbatches; use uniform or normal "
                "numbers, or draw them before the pipeline and pass them in"
            )
        return original(*args, **kwargs)

    return dispatch


def _seeds_without_counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_seed`, which else numbers unseeded operations by the order of tracing."""

    def dispatch(op_seed: int | None) -> Any:
        if not scopes.stack:
            return original(op_seed)
        # Seeded, so that nothing is counted; whether a seed was given stays in the second one.
        graph_seed, _ = original(0 if op_seed is None else op_seed)
        return graph_seed, op_seed or 0

    return dispatch


_STATELESS = {
    "stateless_random_uniform_v2": True,
    "stateless_random_normal_v2": True,
    "stateless_random_uniform_int_v2": True,
    # A rejected sample of a truncated normal makes the counter's use irregular.
    "stateless_truncated_normal_v2": False,
    "stateless_random_uniform_full_int_v2": True,
}
_STATEFUL = {
    "random_uniform": "stateless_random_uniform_v2",
    "random_uniform_int": "stateless_random_uniform_int_v2",
    "random_standard_normal": "stateless_random_normal_v2",
    "truncated_normal": "stateless_truncated_normal_v2",
}
_UNCUTTABLE = {
    gen_random_ops: (
        "multinomial",
        "parameterized_truncated_normal",
        "random_gamma",
        "random_poisson_v2",
        "random_shuffle",
    ),
    gen_stateless_random_ops: (
        "stateless_multinomial",
        "stateless_parameterized_truncated_normal",
        "stateless_random_binomial",
        "stateless_random_poisson",
    ),
    gen_v2: ("stateless_random_gamma_v3", "stateless_shuffle"),
}
_install_lock = threading.Lock()
_installed = False


def _install() -> None:
    """Puts the dispatchers in place, once; without a scope they change nothing."""
    global _installed
    with _install_lock:
        if _installed:
            return
        for name, grouped in _STATELESS.items():
            setattr(gen_v2, name, _stateless(getattr(gen_v2, name), grouped))
        for name, stateless in _STATEFUL.items():
            original = getattr(gen_random_ops, name)
            setattr(gen_random_ops, name, _stateful(original, stateless))
        for module, names in _UNCUTTABLE.items():
            for name in names:
                wrapped = _uncuttable(getattr(module, name), module is gen_random_ops)
                setattr(module, name, wrapped)
        random_seed.get_seed = _seeds_without_counting(random_seed.get_seed)
        _installed = True
