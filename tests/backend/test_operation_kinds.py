"""Kinds of operations, and functions without side effects."""

import pytest
import tensorflow as tf

from pipemesh.backend import operation_kinds as kinds
from pipemesh.backend.graphs import Bodies
from pipemesh.backend.operation_kinds import check_pure, has_effect, has_effects, is_stateful
from pipemesh.errors import PipelineError

WHY = "it is computed twice"


def graph_def(function):
    return tf.function(function).get_concrete_function(tf.TensorSpec([])).graph.as_graph_def()


def told(x):
    tf.print(x)
    return x


def checked(x):
    return tf.debugging.check_numerics(x, "x")


def told_in_a_branch(x):
    return tf.cond(x > 0, lambda: told(x), lambda: x)


@pytest.mark.parametrize(
    "kind",
    sorted(
        (kinds.CHECKS | kinds.TELLS | kinds.READS | kinds.DRAWS_WITH_STATE | kinds.CALLS)
        # TensorFlow does not know lingvo's, and has two kinds of calls.
        - {"AssertShapeMatch", "AssertSameDim0", "PartitionedCall"}
    ),
)
def test_listed_kinds_exist_and_are_stateful(kind):
    assert is_stateful(kind), "it needs no place in a list"


def test_draws_without_state_have_none():
    assert not [kind for kind in kinds.DRAWS_WITHOUT_STATE if is_stateful(kind)]
    assert not kinds.DRAWS_WITHOUT_STATE & kinds.DRAWS_WITH_STATE


@pytest.mark.parametrize(
    "function, effect",
    [(told, True), (checked, True), (told_in_a_branch, True), (tf.sin, False)],
)
def test_effects_are_found_inside_of_branches_too(function, effect):
    definition = graph_def(function)
    assert has_effects(definition) == effect
    bodies = Bodies(definition)
    assert any(has_effect(node, bodies) for node in definition.node) == effect


def test_checks_are_pure_and_prints_only_where_allowed():
    check_pure(graph_def(checked), "it", WHY, effects=False)
    check_pure(graph_def(told), "it", WHY)
    with pytest.raises(PipelineError, match=f"it contains .*PrintV2.*; {WHY}"):
        check_pure(graph_def(told), "it", WHY, effects=False)


@pytest.mark.parametrize(
    "function, advice",
    [
        (lambda x: x + tf.random.normal([]), "stateless_"),
        (lambda x: tf.raw_ops.TruncatedNormal(shape=[1], dtype=tf.float32) + x, "stateless_"),
        (lambda x: tf.numpy_function(lambda y: y, [x], tf.float32), "stateful=False"),
        (lambda x: tf.raw_ops.Timestamp() + tf.cast(x, tf.float64), "Compute it outside"),
    ],
    ids=["draw", "other draw", "python", "clock"],
)
def test_state_is_an_error_with_advice(function, advice):
    with pytest.raises(PipelineError, match=advice):
        check_pure(graph_def(function), "the cell", WHY)


def test_writing_a_variable_is_an_error_with_advice():
    variable = tf.Variable(0.0)
    with pytest.raises(PipelineError, match="accumulators"):
        check_pure(graph_def(variable.assign_add), "the cell", WHY)
    check_pure(graph_def(lambda x: x + variable), "the cell", WHY)
