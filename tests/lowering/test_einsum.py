"""The local product of an einsum; `tests/conformance` runs einsums under all layouts."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.lowering.ops.einsum import local_product, products
from pipemesh.mesh import LayoutRules, Mesh

SIZES = dict(zip("abcdk", (2, 3, 4, 5, 6), strict=True))


def random(term, dtype=tf.float32):
    draw = np.random.default_rng(len(term))
    return tf.cast(draw.standard_normal([SIZES[letter] for letter in term]), dtype)


def kinds(terms, result, *inputs):
    """The kinds of operations that compute a product."""
    function = tf.function(local_product(terms, result), autograph=False)
    graph = function.get_concrete_function(*inputs).graph
    return {op.type for op in graph.get_operations()} & {"MatMul", "Einsum"}


@pytest.mark.parametrize(
    ("left", "right", "result"),
    [
        ("ak", "kb", "ab"),
        ("ka", "kb", "ab"),
        ("ak", "bk", "ab"),
        ("ka", "bk", "ab"),
        ("ak", "kb", "ba"),
        ("bk", "ka", "ab"),
        ("abk", "kcd", "abcd"),
        ("abcd", "cdk", "abk"),
        ("cdab", "kcd", "kab"),
        ("k", "ka", "a"),
        ("ak", "k", "a"),
        ("ab", "ab", ""),
    ],
)
def test_runs_of_dims_make_a_product_of_matrices(left, right, result):
    x, y = random(left), random(right)
    with tf.GradientTape(persistent=True) as tape:
        tape.watch([x, y])
        got = local_product([left, right], result)(x, y)
        want = tf.einsum(f"{left},{right}->{result}", x, y)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    weights = random(result)
    found, wanted = (tape.gradient(out, [x, y], weights) for out in (got, want))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert kinds([left, right], result, x, y) == {"MatMul"}


@pytest.mark.parametrize(
    ("terms", "result"),
    [
        (["abk", "kab"], "ab"),  # dims of both that stay
        (["akb", "kc"], "abc"),  # what is summed lies between
        (["ak", "kb"], "a"),  # a dim of one operand alone is summed
        (["abcd", "dck"], "abk"),  # summed dims in two orders
        (["a", "b"], "ab"),  # nothing is summed
        (["ak", "kb", "b"], "ab"),
        (["ak"], "k"),
    ],
)
def test_other_products_are_left_to_einsum(terms, result):
    operands = [random(term) for term in terms]
    got = local_product(terms, result)(*operands)
    want = np.einsum(f"{','.join(terms)}->{result}", *operands)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    assert kinds(terms, result, *operands) == {"Einsum"}


def test_integers_and_unknown_sizes_are_left_to_einsum():
    terms, result = ["ak", "kb"], "ba"
    x, y = (random(term, tf.int32) for term in terms)
    np.testing.assert_array_equal(local_product(terms, result)(x, y), np.einsum("ak,kb->ba", x, y))
    assert kinds(terms, result, x, y) == {"Einsum"}
    unknown = tf.TensorSpec([None, 6])
    assert kinds(terms, result, unknown, tf.TensorSpec([6, 3])) == {"Einsum"}


def test_the_gradient_of_a_common_operand_is_sent_once():
    def gradient(together):
        mesh, rules = Mesh.from_text("m:2"), LayoutRules.from_text("p:m;q:m")
        lowering = PlacementLowering(mesh, rules, ["CPU:0", "CPU:1"])
        array = tf.constant(random("ab"))
        with tf.GradientTape() as tape:
            tape.watch(array)
            x = ops.import_tensor(lowering, array, "a:2;b:3")
            p = ops.import_tensor(lowering, np.full([3, 4], 2, np.float32), "b:3;p:4")
            q = ops.import_tensor(lowering, np.full([3, 6], 3, np.float32), "b:3;q:6")
            if together:
                found = products(x, [p, q], [["a", "p"], ["a", "q"]])
            else:
                found = [ops.einsum([x, w], ["a", name]) for w, name in ((p, "p"), (q, "q"))]
            loss = ops.export_tensor(sum(ops.reduce_sum(ops.square(y)) for y in found))
        grad = tape.gradient(loss, array)
        return grad, lowering.costs.rows[("m",), "all_reduce", "backward"][0]

    (one, calls), (each, more) = gradient(together=True), gradient(together=False)
    np.testing.assert_allclose(one, each, 1e-6)
    assert (calls, more) == (1, 2)
