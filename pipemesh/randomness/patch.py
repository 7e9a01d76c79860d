"""Dispatchers in front of all random operations of TensorFlow.

Stateless operations keep their key; only the counter moves to the slice's first element. Stateful
operations become stateless. Outside a scope nothing changes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf

from pipemesh.backend.patches import operation, wrap_operation, wrap_seeds
from pipemesh.errors import PipelineError
from pipemesh.randomness.candidates import (
    candidates,
    log_uniform_weights,
    uniform_weights,
    unigram_weights,
)
from pipemesh.randomness.draws import PHILOX, draw
from pipemesh.randomness.retracing import install_eager_loops, install_retracing
from pipemesh.randomness.scope import draw_seed, refuse_slicewise, scopes

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
        if not scopes.stack:
            arguments = (true_classes, num_true, num_sampled, unique, range_max)
            return original(*arguments, seed=seed, seed2=seed2, name=name, **weight_options)
        with tf.name_scope(name or original.__name__):
            return candidates(
                weights(range_max, **weight_options),
                true_classes,
                num_sampled,
                unique,
                lambda shape: operation("random_uniform")(
                    tf.constant(shape), tf.float64, seed=seed, seed2=seed2
                ),
            )

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
_install_lock = threading.Lock()
_installed = False


def install() -> None:
    """Installs the dispatchers once; they change nothing outside a scope."""
    global _installed
    with _install_lock:
        if _installed:
            return
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
        install_retracing()
        install_eager_loops()
        _installed = True
