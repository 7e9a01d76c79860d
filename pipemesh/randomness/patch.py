"""Dispatchers in front of all random operations of TensorFlow, and of functions that draw.

Stateless operations keep their key; only the counter moves to the slice's first element. Stateful
operations become stateless. Outside a scope nothing changes.

TensorFlow traces a `tf.function` once and reuses the trace in any scope of random numbers. Inside a
scope a function is therefore traced anew: for each call while a graph is built, in eager mode for
each position that its draws can have among those of their layers.

A graph traces the functions of a `tf.while_loop` once, and the iteration is part of each key. In
eager mode they run repeatedly: each run begins with the same numbers and adds the iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from pipemesh.backend.patches import (
    extend_trace_keys,
    operation,
    wrap_functions,
    wrap_loops,
    wrap_operation,
    wrap_seeds,
    wrap_trace_lookup,
)
from pipemesh.errors import PipelineError
from pipemesh.randomness.candidates import (
    candidates,
    log_uniform_weights,
    uniform_weights,
    unigram_weights,
)
from pipemesh.randomness.draws import PHILOX, draw
from pipemesh.randomness.scope import Numbers, Scope, draw_seed, refuse_slicewise, scopes

# TensorFlow's number for an algorithm of its choice.
_AUTO = 3


def _stateless(original: Callable[..., Any], grouped_dtypes: bool) -> Callable[..., Any]:
    """Wraps `f(shape, key, counter, alg, *rest)`."""

    def dispatch(shape: Any, key: Any, counter: Any, alg: Any, *rest: Any, **kwargs: Any) -> Any:
        refuse_slicewise(original.__name__)
        if not scopes.stack:
            return original(shape, key, counter, alg, *rest, **kwargs)
        # The automatic choice may differ between devices; Philox exists on all of them.
        algorithm = PHILOX if isinstance(alg, int) and alg == _AUTO else alg
        is_philox = isinstance(algorithm, int) and algorithm == PHILOX
        return draw(
            shape,
            key,
            counter,
            is_philox and grouped_dtypes and _is_32_bit(rest, kwargs),
            lambda s, k, c: original(s, k, c, algorithm, *rest, **kwargs),
        )

    return dispatch


def _is_32_bit(rest: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether a number takes one 32-bit value of the generator; 64-bit types take two."""
    dtype = kwargs.get("dtype", rest[0] if rest else None)
    if dtype is None:
        dtype = kwargs["minval"]
    if not isinstance(dtype, (tf.DType, int, str)):
        dtype = tf.convert_to_tensor(dtype).dtype
    return tf.as_dtype(dtype).size <= 4


def _stateful(original: Callable[..., Any], stateless: str) -> Callable[..., Any]:
    """Wraps `f(shape, dtype or bounds, seed, seed2, name)` to call the stateless operation."""

    def dispatch(shape: Any, *rest: Any, seed: int = 0, seed2: int = 0, name: Any = None) -> Any:
        refuse_slicewise(original.__name__)
        if not scopes.stack:
            return original(shape, *rest, seed=seed, seed2=seed2, name=name)
        seeds = draw_seed() + tf.constant([seed or 0, seed2 or 0], tf.int64)
        key, counter = operation("stateless_random_get_key_counter")(seeds)
        return operation(stateless)(shape, key, counter, PHILOX, *rest, name=name)

    return dispatch


def _uncuttable(original: Callable[..., Any], stateful: bool) -> Callable[..., Any]:
    """Wraps an operation whose numbers cannot be cut into microbatches."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        refuse_slicewise(original.__name__)
        position = scopes.stack[-1].position if scopes.stack else None
        if position is not None and (
            stateful or position.num_microbatches * position.num_slices > 1
        ):
            raise PipelineError(
                f"layer {scopes.stack[-1].layer!r} calls {original.__name__!r} inside a pipeline, "
                "whose numbers would depend on the number of microbatches; use uniform or normal "
                "numbers, or draw them before the pipeline and pass them in"
            )
        return original(*args, **kwargs)

    return dispatch


def _sampler(original: Callable[..., Any], weights: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `f(true_classes, num_true, num_sampled, unique, range_max, ...)`."""

    def dispatch(
        true_classes: Any,
        num_true: int,
        num_sampled: int,
        unique: bool,
        range_max: int,
        seed: int = 0,
        seed2: int = 0,
        name: Any = None,
        **weight_options: Any,
    ) -> Any:
        seeds = {"seed": seed, "seed2": seed2}
        if not scopes.stack:
            arguments = (true_classes, num_true, num_sampled, unique, range_max)
            return original(*arguments, **seeds, name=name, **weight_options)

        def uniform(shape: Sequence[int]) -> tf.Tensor:
            return operation("random_uniform")(tf.constant(shape), tf.float64, **seeds)

        with tf.name_scope(name or original.__name__):
            weights_of_classes = weights(range_max, **weight_options)
            return candidates(weights_of_classes, true_classes, num_sampled, unique, uniform)

    return dispatch


def _learned_sampler(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a sampler whose distribution changes with each call."""

    def dispatch(*args: Any, **kwargs: Any) -> Any:
        if scopes.stack:
            raise PipelineError(
                f"layer {scopes.stack[-1].layer!r} calls {original.__name__!r}, which learns what "
                "to sample from each call, so a run cannot be repeated or resumed; use "
                "tf.random.log_uniform_candidate_sampler or fixed_unigram_candidate_sampler"
            )
        return original(*args, **kwargs)

    return dispatch


def _seeds_without_counting(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `get_seed`, which otherwise numbers unseeded operations by the order of tracing."""

    def dispatch(op_seed: int | None) -> Any:
        if not scopes.stack:
            return original(op_seed)
        # Seeded, so that nothing is counted; the second seed still says whether a seed was given.
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
_UNCUTTABLE_STATEFUL = (
    "multinomial",
    "parameterized_truncated_normal",
    "random_gamma",
    "random_poisson_v2",
    "random_shuffle",
)
_UNCUTTABLE_STATELESS = (
    "stateless_multinomial",
    "stateless_parameterized_truncated_normal",
    "stateless_random_binomial",
    "stateless_random_poisson",
    "stateless_random_gamma_v3",
    "stateless_shuffle",
)
# With the function that computes the weights of their classes.
_SAMPLERS = {
    "uniform_candidate_sampler": uniform_weights,
    "log_uniform_candidate_sampler": log_uniform_weights,
    "fixed_unigram_candidate_sampler": unigram_weights,
}
_LEARNED_SAMPLERS = (
    "learned_unigram_candidate_sampler",
    "thread_unsafe_unigram_candidate_sampler",
)


@functools.cache
def install() -> None:
    """Installs the dispatchers once; they change nothing outside a scope."""
    for name, grouped in _STATELESS.items():
        wrap_operation(name, functools.partial(_stateless, grouped_dtypes=grouped))
    for name, stateless in _STATEFUL.items():
        wrap_operation(name, functools.partial(_stateful, stateless=stateless))
    for name in _UNCUTTABLE_STATEFUL:
        wrap_operation(name, functools.partial(_uncuttable, stateful=True))
    for name in _UNCUTTABLE_STATELESS:
        wrap_operation(name, functools.partial(_uncuttable, stateful=False))
    for name, weights in _SAMPLERS.items():
        wrap_operation(name, functools.partial(_sampler, weights=weights))
    for name in _LEARNED_SAMPLERS:
        wrap_operation(name, _learned_sampler)
    wrap_seeds(_seeds_without_counting)
    wrap_functions(lambda call: _in_scope(call, _call), lambda trace: _in_scope(trace, _new_trace))
    wrap_trace_lookup(_find_trace)
    extend_trace_keys(lambda: (scopes.calls[-1].key,) if scopes.calls else ())
    wrap_loops(_loop_in_scope)


_NUMBERS_AFTER = "_pipemesh_numbers_after"


@dataclasses.dataclass(frozen=True)
class _Call:
    """A call of a `tf.function` inside a scope."""

    function: Any
    # None where each processor computes on its own slice.
    scope: Scope | None
    # The numbers before the call.
    before: Numbers
    # Part of the key of the trace.
    key: Any
    # Whether later calls may find the trace.
    is_found_again: bool = False


def _in_scope(original: Callable[..., Any], make: Callable[[Any], _Call]) -> Callable[..., Any]:
    """Wraps a method of `tf.function` that finds or makes a trace."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not scopes.stack and not scopes.slicewise:
            return original(self, *args, **kwargs)
        scopes.calls.append(make(self))
        try:
            return original(self, *args, **kwargs)
        finally:
            scopes.calls.pop()

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


def _new_trace(function: Any) -> _Call:
    if scopes.slicewise:
        # Nothing is drawn inside, so all traces are equal.
        return _Call(function, None, Numbers(), "slicewise")
    return _Call(function, scopes.stack[-1], scopes.stack[-1].numbers.copy(), object())


def _call(function: Any) -> _Call:
    new = _new_trace(function)
    scope = new.scope
    if scope is None or not tf.executing_eagerly():
        return new
    if scope.position is not None or scope.iterations or scope.turns:
        # The current values of these tensors would become part of the trace.
        return new
    counted = [tuple(sorted(items.items())) for items in (scope.aliases, new.before)]
    key = (scope.stack, scope.layer, *counted)
    return dataclasses.replace(new, key=key, is_found_again=True)


def _find_trace(find: Callable[[], Any], is_of: Callable[[Any], bool]) -> Any:
    """Finds or makes a trace that begins with the numbers from before the call."""
    # A trace that was found has drawn as often as when it was made.
    call = scopes.calls[-1] if scopes.calls else None
    if call is None or call.scope is None or not is_of(call.function):
        return find()
    call.scope.numbers = call.before.copy()
    trace = find()
    after = getattr(trace, _NUMBERS_AFTER, None)
    if after is None:
        setattr(trace, _NUMBERS_AFTER, call.scope.numbers.copy())
    else:
        call.scope.numbers = after.copy()
    return trace


def _loop_in_scope(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(cond: Any, body: Any, loop_vars: Any, *args: Any, **kwargs: Any) -> Any:
        if not scopes.stack or not tf.executing_eagerly():
            return original(cond, body, loop_vars, *args, **kwargs)
        scope = scopes.stack[-1]
        scope.turns = (*scope.turns, 0)
        try:
            once = _Once(scope, cond), _Once(scope, body, counts=True)
            return original(*once, loop_vars, *args, **kwargs)
        finally:
            scope.turns = scope.turns[:-1]

    call.__name__, call.__doc__ = original.__name__, original.__doc__
    return call


class _Once:
    """A function of a loop that takes its numbers once, however often it is called."""

    def __init__(self, scope: Scope, function: Callable[..., Any], counts: bool = False) -> None:
        self._scope, self._function, self._counts = scope, function, counts
        self._before: Numbers | None = None

    def __call__(self, *args: Any) -> Any:
        scope = self._scope
        if self._before is None:
            self._before = scope.numbers.copy()
            result = self._function(*args)
        else:
            after = scope.numbers
            scope.numbers = self._before.copy()
            result = self._function(*args)
            scope.numbers = after
        if self._counts:
            scope.turns = (*scope.turns[:-1], scope.turns[-1] + 1)
        return result
