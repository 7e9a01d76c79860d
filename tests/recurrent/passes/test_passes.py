"""A stage's passes over a microbatch, one after the other, give its results and gradients."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.recurrent.passes.passes import Passes
from pipemesh.recurrent.watch.health import empty_note
from tests.recurrent.passes.traced import DEVICES, ROWS, WEIGHTS, WIDTH, X, run, traced_stage

DY = np.random.default_rng(2).normal(size=[ROWS, WIDTH]).astype(np.float32)
SUMS = np.random.default_rng(3).normal(size=[2, WIDTH, WIDTH]).astype(np.float32)


def wanted():
    """Output, gradient of the input, and of both weights."""
    x, weights = tf.constant(X), [tf.constant(w) for w in WEIGHTS]
    with tf.GradientTape() as tape:
        tape.watch([x, *weights])
        y = tf.tanh(tf.matmul(tf.tanh(tf.matmul(x, weights[0])), weights[1]))
    return [y, *tape.gradient(y, [x, *weights], tf.constant(DY))]


class Fixture:
    """Passes of a small stage in the current graph, and what they are given."""

    def __init__(self, remat="none", replicas=1, probes=False):
        self.traced = traced_stage(replicas=replicas)
        self.passes = Passes(
            self.traced,
            lambda node: remat == "full",
            [tf.float32] * 2,
            self.traced.forward_probes() if probes else [],
            self.traced.backward_probes(False) if probes else [],
        )
        self.replicas = replicas
        self.theta = [tf.constant(w) for w in WEIGHTS] * replicas
        self.scalars = [tf.constant(1, tf.int64), tf.constant(5, tf.int64)]
        self.notes = [empty_note() for _ in range(replicas)]

    def forward(self, x=X):
        inputs = [tf.constant(x)] * self.replicas
        return self.passes.forward(self.theta, [tf.constant(0)], inputs, self.scalars, self.notes)

    def grads(self):
        return [tf.constant(DY)] * self.replicas


@pytest.mark.parametrize("sums", [None, SUMS], ids=["first", "later"])
@pytest.mark.parametrize("halves", [False, True], ids=["B", "I_and_W"])
@pytest.mark.parametrize("remat", ["none", "full"])
def test_passes_give_results_and_gradients(remat, halves, sums):
    with tf.Graph().as_default():
        fixture = Fixture(remat)
        outputs, carry, kept, _ = fixture.forward()
        assert len(kept) == len(fixture.passes.cuts.kept) == (1 if remat == "full" else 3)
        accumulators = None if sums is None else [*map(tf.constant, sums)]
        arguments = fixture.theta, kept, fixture.grads(), fixture.scalars
        if halves:
            result = fixture.passes.input_grad(*arguments, fixture.notes)
            assert result.accumulators is None
            totals = fixture.passes.weight_grad(
                fixture.theta, result.pending, fixture.scalars, accumulators
            )
        else:
            result = fixture.passes.backward(*arguments, accumulators, fixture.notes)
            assert result.pending == []
            totals = result.accumulators
        assert result.carry_grads == [None]
        found, count = run([[*outputs, *result.input_grads, *totals], carry])
    y, of_x, *of_weights = wanted()
    of_weights = [g if sums is None else g + s for g, s in zip(of_weights, SUMS, strict=True)]
    for got, want in zip(found, [y, of_x, *of_weights], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert count == [1]


def test_replicas_pass_the_carry_on_and_sum_their_weights_gradients():
    with tf.Graph().as_default():
        fixture = Fixture(replicas=2)
        passes = fixture.passes
        assert passes.accumulator_places == [0, 0, 1, 1]
        outputs, carry, kept, notes = fixture.forward()
        result = passes.backward(fixture.theta, kept, fixture.grads(), fixture.scalars, None, notes)
        assert [len(outputs), len(result.input_grads), len(result.accumulators)] == [2, 2, 4]
        gradients = passes.theta_gradients(result.accumulators)
        devices = [t.device for t in outputs]
        found, count = run([[*outputs, *result.input_grads, *gradients], carry])
    y, of_x, *of_weights = wanted()
    for got, want in zip(found, [y, y, of_x, of_x, *(2 * g for g in of_weights)], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)
    assert count == [2]
    assert devices == [f"/device:{device}" for device in DEVICES]


def test_sums_start_from_zeros_where_their_replica_is():
    with tf.Graph().as_default():
        passes = Fixture(replicas=2).passes
        zeros = passes.zero_gradients()
        assert [t.device for t in zeros] == [f"/device:{DEVICES[i]}" for i in (0, 0, 1, 1)]
        assert passes.accumulator_specs == [tf.TensorSpec([WIDTH, WIDTH])] * 4
        assert not any(value.any() for value in run(zeros))


def test_a_weight_that_nothing_uses_has_no_gradient():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(inputs[0], theta[1])], carry

    with tf.Graph().as_default():
        traced = traced_stage(forward)
        passes = Passes(traced, lambda node: False, [tf.float32, tf.bfloat16], [], [])
        assert passes.accumulator_specs == [tf.TensorSpec([WIDTH, WIDTH], tf.bfloat16)]
        total = tf.zeros([WIDTH, WIDTH])
        assert passes.theta_gradients([total]) == [None, total]


@pytest.mark.parametrize("probes", [False, True])
def test_the_first_place_that_is_not_finite_is_noted_if_there_are_probes(probes):
    with tf.Graph().as_default():
        fixture = Fixture(probes=probes)
        note = fixture.forward(X * np.float32("nan"))[-1]
        fine = fixture.forward()[-1]
        # Microbatch 1, of two probes the first one.
        assert run([note, fine]) == [[2 if probes else -1], [-1]]


def test_what_the_forward_pass_has_checked_is_not_checked_when_it_is_computed_again():
    def forward(theta, carry, inputs, microbatch, step):
        h = tf.tanh(tf.debugging.check_numerics(tf.matmul(inputs[0], theta[0]), "bad"))
        return [tf.matmul(h, theta[1])], carry

    with tf.Graph().as_default() as graph:
        traced = traced_stage(forward)
        passes = Passes(traced, lambda node: True, [tf.float32] * 2, [], [])
        arguments = [tf.constant(w) for w in WEIGHTS], [tf.constant(0)], [tf.constant(X)]
        scalars, notes = [tf.constant(0, tf.int64)] * 2, [empty_note()]

        def checks():
            functions = graph.as_graph_def().library.function
            # Without those of gradients, which TensorFlow adds.
            nodes = [node for function in functions for node in function.node_def]
            return sum(node.attr["message"].s == b"bad" for node in nodes if "message" in node.attr)

        _, _, kept, _ = passes.forward(*arguments, scalars, notes)
        before = checks()
        passes.backward(arguments[0], kept, [tf.constant(DY)], scalars, None, notes)
        assert before >= 1 and checks() == before
