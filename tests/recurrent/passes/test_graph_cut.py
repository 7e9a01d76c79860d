"""Parts of a graph, asked for by the names of tensors."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.passes.graph_cut import GraphCut, node_of, tensor_name


def small_graph():
    """Graph of y = (x + w) * (x + w), z = w - 1, and a check of x + w."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        w = tf.compat.v1.placeholder(tf.float32, [2], name="w")
        total = tf.add(x, w, name="total")
        checked = tf.debugging.check_numerics(total, "bad", name="checked")
        tf.multiply(checked, checked, name="y")
        tf.subtract(w, 1.0, name="z")
    return graph


def cut_of(graph, prepare=lambda nodes: None, captures=None, asked_for=("y:0", "z:0")):
    return GraphCut(graph, captures or {}, prepare, {}, asked_for)


@pytest.fixture
def cut():
    return cut_of(small_graph())


def test_names_of_tensors_and_nodes():
    assert tensor_name("split") == "split:0"
    assert tensor_name("split:1") == "split:1"
    assert node_of("split:1") == node_of("split:0") == "split"


def test_ancestors_are_what_a_tensor_needs(cut):
    assert cut.ancestors(["y:0"]) == {"y", "checked", "total", "x", "w"}
    assert cut.ancestors(["y:0"], ["total:0"]) == {"y", "checked"}
    assert cut.ancestors(["y:0", "z:0"], ["y:0"]) == {"z", "w", "z/y"}
    assert cut.ancestors([]) == set()


def test_descendants_are_what_depends_on_a_tensor(cut):
    assert cut.descendants(["x:0"]) == {"x", "total", "checked", "y"}
    assert cut.descendants(["w:0"]) == {"w", "total", "checked", "y", "z"}


def test_used_are_the_given_tensors_that_are_needed(cut):
    assert cut.used(["y:0"], ["x:0", "w:0", "z:0"]) == {"x:0", "w:0"}
    # What lies behind another given one is not needed, and a given one may be what is wanted.
    assert cut.used(["y:0"], ["x:0", "total:0"]) == {"total:0"}
    assert cut.used(["x:0"], ["x:0", "w:0"]) == {"x:0"}


def test_the_frontier_is_what_is_known_and_needed_first(cut):
    assert cut.frontier(["y:0"], {"x", "w", "total"}) == ["total:0"]
    assert cut.frontier(["y:0", "z:0"], {"x", "w"}) == ["w:0", "x:0"]
    assert cut.frontier(["z:0"], {"z", "w"}) == ["z:0"]
    assert cut.frontier(["y:0", "z:0"], {"x", "w"}, cuts=["total:0"]) == ["w:0"]


def test_nodes_are_the_chosen_ones_that_are_needed(cut):
    names = [node.name for node in cut.nodes(["y:0"], lambda name: name != "x")]
    assert names == ["w", "total", "checked", "y"]


def test_effects_are_what_checks_or_tells(cut):
    assert cut.effects(100) == ["checked"]
    assert cut.effects(3) == []


def test_state_is_an_error():
    graph = small_graph()
    cut_of(graph).check_pure("this", "it runs twice")
    with graph.as_default():
        tf.random.uniform([2], name="draw")
    with pytest.raises(PipelineError, match=r"(?s)this.*RandomUniform"):
        cut_of(graph).check_pure("this", "it runs twice")


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


def test_pasted_are_the_wanted_tensors_of_other_values(cut):
    (y, z), types = pasted(cut, {"x:0": [1.0, 2.0], "w:0": [3.0, 4.0]}, ["y:0", "z:0"])
    np.testing.assert_array_equal(y, [16.0, 36.0])
    np.testing.assert_array_equal(z, [2.0, 3.0])
    assert types.count("CheckNumerics") == 1


def test_pasted_is_nothing_that_is_not_needed(cut):
    (y, total), types = pasted(cut, {"total:0": [2.0, 3.0]}, ["y:0", "total:0"])
    np.testing.assert_array_equal(y, [4.0, 9.0])
    np.testing.assert_array_equal(total, [2.0, 3.0])
    assert not {"Placeholder", "AddV2", "Sub"} & {*types}


def test_what_was_checked_before_is_not_checked_again(cut):
    values = {"total:0": [np.inf, 3.0]}
    with pytest.raises(tf.errors.InvalidArgumentError, match="bad"):
        pasted(cut, values, ["y:0"])
    (y,), types = pasted(cut, values, ["y:0"], checked={"checked"})
    np.testing.assert_array_equal(y, [np.inf, 9.0])
    assert "CheckNumerics" not in types


def test_what_was_asked_for_by_its_effect_is_pasted_too(cut):
    values = {"x:0": [1.0, 2.0], "w:0": [3.0, 4.0]}
    assert "CheckNumerics" not in pasted(cut, values, ["z:0"])[1]
    assert "CheckNumerics" in pasted(cut, values, ["z:0"], effects=["checked"])[1]


def test_control_dependencies_are_left_out():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [2], name="x")
        with tf.control_dependencies([tf.debugging.Assert(x[0] > 0, [x], name="positive")]):
            tf.add(x, x, name="y")
    cut = cut_of(graph, asked_for=["y:0"])
    assert cut.ancestors(["y:0"]) == {"x", "y"}
    np.testing.assert_array_equal(pasted(cut, {"x:0": [-1.0, 1.0]}, ["y:0"])[0][0], [-2.0, 2.0])


def test_nodes_are_prepared_before_anything_else():
    def without_check(nodes):
        for node in nodes:
            if node.op == "CheckNumerics":
                node.op = "Identity"
                node.attr.pop("message")

    cut = cut_of(small_graph(), without_check)
    assert cut.effects(100) == []
    assert cut.ancestors(["y:0"]) == {"y", "total", "x", "w"}


def test_a_shape_that_python_has_set_stays():
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None], name="x")
        tf.unique(x, name="y").y.set_shape([2])
    cut = cut_of(graph, asked_for=["y:0"])
    with tf.Graph().as_default():

        @tf.function(autograph=False)
        def run():
            (found,) = cut.paste({"x:0": tf.constant([1.0, 2.0, 1.0])}, ["y:0"])
            assert found.shape == [2]
            return found

        run.get_concrete_function()


def test_captured_tensors_become_captures_of_the_function_that_is_built():
    with tf.Graph().as_default():
        outside = tf.constant([5.0, 6.0])

        @tf.function(autograph=False)
        def traced():
            return tf.add(outside, 1.0, name="y")

        graph = traced.get_concrete_function().graph
        captures = {inner.name: outer for outer, inner in graph.captures}
        cut = cut_of(graph, captures=captures, asked_for=["y:0"])

        @tf.function(autograph=False)
        def run():
            return cut.paste({}, ["y:0"])

        concrete = run.get_concrete_function()
        assert [outer is outside for outer, _ in concrete.graph.captures] == [True]
        with tf.compat.v1.Session() as session:
            np.testing.assert_array_equal(session.run(concrete())[0], [6.0, 7.0])
