"""What is handed from pass to pass under a choice of what is computed again."""

import tensorflow as tf

from pipemesh.recurrent.passes.cuts import Cuts
from pipemesh.recurrent.passes.graph_cut import node_of
from tests.recurrent.passes.traced import ROWS, WEIGHTS, WIDTH, X, traced_stage, two_layers


def nothing(node):
    return False


def everything(node):
    return True


def cuts_of(recomputed, forward=two_layers, **given):
    with tf.Graph().as_default():
        traced = traced_stage(forward, **given)
    return traced, Cuts(traced, recomputed)


def types(traced, names):
    found = {node.name: node.op for node in traced.nodes(0)}
    return sorted(found[node_of(name)] for name in names)


def test_a_stage_that_recomputes_keeps_its_inputs_alone():
    traced, cuts = cuts_of(everything)
    assert cuts.kept == traced.inputs
    assert cuts.recomputes
    assert cuts.again == cuts.computed & cuts.per_microbatch


def test_a_stage_that_does_not_keeps_what_gradients_need():
    traced, cuts = cuts_of(nothing)
    # What both `tanh` give, and what meets the first weight.
    assert types(traced, cuts.kept) == ["Placeholder", "Tanh", "Tanh"]
    assert not cuts.recomputes and cuts.again == set()


def test_layers_that_are_computed_again_start_from_what_the_others_gave():
    with tf.Graph().as_default():
        traced = traced_stage()
    cuts = Cuts(traced, lambda node: traced.layers.get(node) == "second")
    assert types(traced, cuts.kept) == ["Placeholder", "Tanh"]
    assert {traced.layers[node] for node in cuts.again} == {"second"}


def test_what_depends_on_weights_alone_is_never_kept():
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.matmul(tf.matmul(inputs[0], tf.exp(theta[0])), theta[1])], carry

    traced, cuts = cuts_of(nothing, forward)
    assert "Exp" not in types(traced, cuts.kept)
    assert all(traced.spec(name).shape == [ROWS, WIDTH] for name in cuts.kept)
    exp = next(node.name for node in traced.nodes(0) if node.op == "Exp")
    assert exp in cuts.computed and exp not in cuts.per_microbatch


def test_the_number_of_the_microbatch_is_not_kept():
    def forward(theta, carry, inputs, microbatch, step):
        return [inputs[0] * tf.cast(microbatch, tf.float32) * theta[0][0]], carry

    traced, cuts = cuts_of(everything, forward)
    assert not {*cuts.kept} & {*traced.scalars}


def test_a_backward_pass_starts_from_the_gradients_of_floating_results():
    def forward(theta, carry, inputs, microbatch, step):
        state = tf.tanh(tf.matmul(inputs[0], theta[0]) + carry[0])
        return [state, inputs[1]], [state, carry[1] + 1]

    given = {"forward": forward, "inputs": (X, [1, 2]), "carry": (X, 0)}
    traced, cuts = cuts_of(nothing, **given)
    assert cuts.grad_placeholders == [traced.gradients.of_outputs[0]]
    assert cuts.upstream_names == [traced.gradients.of_inputs[0]]
    traced, cuts = cuts_of(nothing, recurrent=True, **given)
    of_state = traced.gradients.of_carry_out[0]
    assert cuts.grad_placeholders == [traced.gradients.of_outputs[0], of_state]
    assert cuts.upstream_names == [traced.gradients.of_inputs[0], traced.gradients.of_carry[0]]


def products(traced, cuts, wanted, given):
    """How many products lie between what is given and what is wanted."""
    needed = traced.cut.ancestors(wanted, given) & cuts.per_microbatch
    return types(traced, [f"{name}:0" for name in needed]).count("MatMul")


def test_the_halves_of_a_backward_pass_share_nothing():
    traced, cuts = cuts_of(nothing)
    given = [*cuts.kept, *cuts.grad_placeholders]
    both = [*cuts.theta_names, *cuts.upstream_names]
    assert products(traced, cuts, both, given) == 4
    assert products(traced, cuts, cuts.upstream_names, given) == 2
    assert products(traced, cuts, cuts.theta_names, cuts.pending) == 2
    second = traced.cut.ancestors(cuts.theta_names, cuts.pending)
    assert not second & cuts.input_grad_nodes


def test_without_gradients_of_inputs_the_first_half_computes_what_weights_share():
    def forward(theta, carry, inputs, microbatch, step):
        h = tf.tanh(tf.gather(theta[0], inputs[0]))
        return [tf.tanh(tf.matmul(tf.matmul(h, theta[1]), theta[1]))], carry

    theta = (WEIGHTS[0], WEIGHTS[1])
    traced, cuts = cuts_of(nothing, forward, theta=theta, inputs=([0, 2],))
    assert cuts.upstream_names == []
    # The table's gradient is sparse.
    assert len(cuts.theta_names) == 3
    assert "TanhGrad" in types(traced, [f"{name}:0" for name in cuts.input_grad_nodes])
    second = traced.cut.ancestors(cuts.theta_names, cuts.pending)
    assert not second & cuts.input_grad_nodes
