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


MATMULS = (
    "ak,kb->ab ka,kb->ab ak,bk->ab ka,bk->ab ak,kb->ba bk,ka->ab abk,kcd->abcd abcd,cdk->abk "
    "cdab,kcd->kab k,ka->a ak,k->a ab,ab->"
).split()
OTHERS = [
    "abk,kab->ab",  # dims of both that stay
    "akb,kc->abc",  # what is summed lies between
    "ak,kb->a",  # a dim of one operand alone is summed
    "abcd,dck->abk",  # summed dims in two orders
    "a,b->ab",  # nothing is summed
    "ak,kb,b->ab",
    "ak->k",
]


@pytest.mark.parametrize(
    ("equation", "kind"),
    [*((each, "MatMul") for each in MATMULS), *((each, "Einsum") for each in OTHERS)],
)
def test_runs_of_dims_make_a_product_of_matrices(equation, kind):
    """Other products are left to einsum."""
    terms, result = equation.split("->")[0].split(","), equation.split("->")[1]
    operands = [random(term) for term in terms]
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(operands)
        got = local_product(terms, result)(*operands)
        want = tf.einsum(equation, *operands)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
    found, wanted = (tape.gradient(out, operands, random(result)) for out in (got, want))
    for mine, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    assert kinds(terms, result, *operands) == {kind}


def test_integers_and_unknown_sizes_are_left_to_einsum():
    x, y = random("ak", tf.int32), random("kb", tf.int32)
    got = local_product(["ak", "kb"], "ba")(x, y)
    np.testing.assert_array_equal(got, np.einsum("ak,kb->ba", x, y))
    assert kinds(["ak", "kb"], "ba", x, y) == {"Einsum"}
    unknown = tf.TensorSpec([None, 6]), tf.TensorSpec([6, 3])
    assert kinds(["ak", "kb"], "ba", *unknown) == {"Einsum"}


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
