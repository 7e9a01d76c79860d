"""Every caller inside of TensorFlow goes through what is wrapped."""

import pytest
import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import (
    function_context,
    polymorphic_function,
    tracing_compilation,
)
from tensorflow.python.framework import random_seed
from tensorflow.python.ops import (
    gen_logging_ops,
    gen_random_ops,
    gen_stateless_random_ops_v2,
    while_loop,
)

from pipemesh.backend import patches


@pytest.fixture
def unwrapped():
    """Puts back what a test has wrapped."""
    places = [
        (random_seed, "get_seed"),
        (while_loop, "while_loop"),
        (polymorphic_function.Function, "__call__"),
        (polymorphic_function.Function, "get_concrete_function"),
        (tracing_compilation, "_maybe_define_function"),
        (function_context, "make_function_context"),
        (gen_random_ops, "random_standard_normal"),
        (gen_stateless_random_ops_v2, "stateless_random_uniform_v2"),
        (gen_logging_ops, "print_v2"),
    ]
    saved = [(home, name, getattr(home, name)) for home, name in places]
    yield
    for home, name, original in saved:
        setattr(home, name, original)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def noting(calls, unwrapped):
    """Wraps a function so that each call is noted by a name."""

    def under(name):
        def wrap(original):
            def call(*args, **kwargs):
                calls.append(name)
                return original(*args, **kwargs)

            return call

        return wrap

    return under


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("random_standard_normal", lambda: tf.random.normal([2])),
        ("stateless_random_uniform_v2", lambda: tf.random.stateless_uniform([2], [1, 2])),
        ("print_v2", lambda: tf.print("", output_stream="file:///dev/null")),
    ],
)
def test_operations_are_wrapped_for_every_caller(name, call, noting, calls):
    before = patches.operation(name)
    patches.wrap_operation(name, noting(name))
    assert patches.operation(name) is not before
    call()
    assert calls == [name]


def test_an_operation_that_does_not_exist_is_not_found():
    with pytest.raises(StopIteration):
        patches.operation("no_such_operation")


def test_seeds_and_loops_are_wrapped(noting, calls):
    patches.wrap_seeds(noting("seed"))
    patches.wrap_loops(noting("loop"))
    tf.random.uniform([2])
    assert calls == ["seed"]
    assert tf.while_loop(lambda i: i < 3, lambda i: (i + 1,), (0,))[0].numpy() == 3
    tf.map_fn(lambda x: x, tf.zeros([2]))
    assert calls == ["seed", "loop", "loop"]


def test_calls_and_traces_of_functions_are_wrapped_apart(noting, calls):
    patches.wrap_functions(noting("call"), noting("new trace"))
    function = tf.function(lambda x: x + 1)
    assert function(tf.constant(1)).numpy() == 2
    assert calls == ["call"]
    function.get_concrete_function(tf.TensorSpec([]))
    assert calls == ["call", "new trace"]


def test_trace_lookup_knows_the_called_function(unwrapped):
    function, other, seen = tf.function(lambda x: x + 1), tf.function(lambda x: x), []

    def wrap(find, is_of):
        trace = find()
        seen.append((is_of(function), is_of(other), trace))
        return trace

    patches.wrap_trace_lookup(wrap)
    for _ in range(2):
        assert function(tf.constant(1)).numpy() == 2
    first, second = seen
    assert first[:2] == second[:2] == (True, False) and first[2] is second[2]


def test_more_may_count_when_a_trace_is_looked_for(unwrapped):
    extras, traced = [()], []

    @tf.function
    def function(x):
        traced.append(extras[0])
        return x

    patches.extend_trace_keys(lambda: extras[0])
    for extras[0] in [(), (1,), (1, "a"), (1,), ()]:
        function(tf.constant(1))
    assert traced == [(), (1,), (1, "a")]
