"""Parts of a graph, asked for by the names of tensors."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.backend.graphs import Bodies
from pipemesh.recurrent.passes.graph_cut import GraphCut, use_first


def merged(graph, layer_of=None, kept=()):
    """The nodes of a graph, by name, after it."""
    graph_def = graph.as_graph_def()
    use_first(graph_def.node, Bodies(graph_def), layer_of or {}, kept)
    return {node.name: node for node in graph_def.node}, graph_def


def needed(nodes, name):
    """Names of the nodes that a node needs, itself included."""
    found, todo = set(), [name]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo.extend(source.partition(":")[0] for source in nodes[node].input)
    return found


def test_constants_and_what_is_computed_of_them_are_there_once():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        terms = [tf.exp(x * tf.constant(2.0)) for _ in range(5)]
        tf.add_n(terms, name="sum")
    nodes, _ = merged(graph)
    assert len(needed(nodes, "sum")) == 5


def test_identities_are_passed_by_on_one_device_only():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        tf.exp(tf.stop_gradient(tf.identity(x)), name="here")
        with tf.device("CPU:1"):
            moved = tf.identity(x, name="moved")
        tf.exp(moved, name="there")
    nodes, _ = merged(graph)
    assert list(nodes["here"].input) == ["x"]
    assert list(nodes["there"].input) == ["moved"]


def test_nodes_of_two_layers_stay_apart_but_for_constants():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        a = tf.multiply(x, tf.constant(2.0, name="ca"), name="a")
        b = tf.multiply(x, tf.constant(2.0, name="cb"), name="b")
        tf.identity(a, name="handed")
        tf.add(a, b, name="sum")
    nodes, _ = merged(graph, {"a": "one", "ca": "one", "b": "two", "cb": "two", "handed": "two"})
    assert list(nodes["sum"].input) == ["a", "b"]
    assert list(nodes["b"].input) == ["x", "ca"]


def checked(shape, seed, name):
    return tf.debugging.check_numerics(tf.zeros(shape), "bad", name=name)


@pytest.mark.parametrize("make", [tf.random.uniform, tf.compat.v1.random_normal, checked])
def test_what_has_state_or_checks_stays_apart(make):
    with tf.Graph().as_default() as graph:
        a, b = make([3], seed=1, name="a"), make([3], seed=1, name="b")
        tf.subtract(a, b, name="difference")
    nodes, _ = merged(graph)
    kinds = [nodes[name].op for name in needed(nodes, "difference")]
    assert len([kind for kind in kinds if kind.startswith(("Random", "Check"))]) == 2


UNARY = (tf.exp, tf.sin, tf.identity, tf.stop_gradient, lambda t: t * 2.0, lambda t: 2.0 + t)


@settings(max_examples=25, deadline=None)
@given(st.data())
@pytest.mark.slow
def test_random_graphs_compute_what_they_did(data):
    value = np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3)
    layers = {}
    with tf.Graph().as_default() as graph:
        tensors = [tf.compat.v1.placeholder(tf.float32, [2, 3], name="x")]
        for _ in range(data.draw(st.integers(1, 25))):
            first = data.draw(st.sampled_from(tensors))
            if data.draw(st.booleans()):
                made = data.draw(st.sampled_from(UNARY))(first)
                tensors.append(made)
            else:
                parts = tf.split(first + data.draw(st.sampled_from(tensors)), 3, axis=1)
                tensors.append(tf.concat([*parts[1:], parts[0]], axis=1))
            if data.draw(st.booleans()):
                layers[tensors[-1].op.name] = data.draw(st.sampled_from("ab"))
        names = [t.name for t in tensors]
        before = tf.compat.v1.Session(graph=graph).run(names, {"x:0": value})
    kept = {name.partition(":")[0] for name in names if data.draw(st.booleans())}
    _, graph_def = merged(graph, layers, kept)
    with tf.Graph().as_default() as again:
        tf.import_graph_def(graph_def, name="")
        after = tf.compat.v1.Session(graph=again).run(names, {"x:0": value})
    for one, other in zip(before, after, strict=True):
        np.testing.assert_array_equal(one, other)


def cut_of(graph):
    return GraphCut(graph, {}, lambda nodes: None, {}, ["y:0"])


def pasted(cut, values, fetches, **arguments):
    """The values of the fetches, and how many operations of each type were pasted."""
    with tf.Graph().as_default():

        @tf.function(autograph=False)
        def run():
            given = {name: tf.constant(value) for name, value in values.items()}
            return cut.paste(given, fetches, **arguments)

        concrete = run.get_concrete_function()
        with tf.compat.v1.Session() as session:
            found = session.run(concrete())
        types = [op.type for op in concrete.graph.get_operations()]
    return found, types


def test_what_was_checked_before_is_not_checked_again():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        checked = tf.debugging.check_numerics(tf.abs(x, name="total"), "bad", name="checked")
        tf.multiply(checked, checked, name="y")
    cut = cut_of(graph)
    values = {"total:0": [np.inf, 3.0]}
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        pasted(cut, values, ["y:0"])
    (y,), types = pasted(cut, values, ["y:0"], checked={"checked"})
    np.testing.assert_array_equal(y, [np.inf, 9.0])
    assert "CheckNumerics" not in types


def test_control_dependencies_are_left_out():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        with tf.control_dependencies([tf.debugging.Assert(x[0] > 0, [x], name="positive")]):
            tf.add(x, x, name="y")
    cut = cut_of(graph)
    assert cut.ancestors(["y:0"]) == {"x", "y"}
    np.testing.assert_array_equal(pasted(cut, {"x:0": [-1.0, 1.0]}, ["y:0"])[0][0], [-2.0, 2.0])


def test_a_shape_that_python_has_set_stays():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        tf.unique(x, name="y").y.set_shape([2])
    cut = cut_of(graph)
    with tf.Graph().as_default():

        @tf.function(autograph=False)
        def run():
            (found,) = cut.paste({"x:0": tf.constant([1.0, 2.0, 1.0])}, ["y:0"])
            assert found.shape == [2]
            return found

        run.get_concrete_function()
