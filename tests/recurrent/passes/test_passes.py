"""A stage's passes over a microbatch, one after the other, give its results and gradients."""

import collections

import pytest
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.graphs import operations_within
from pipemesh.errors import PipelineError
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.passes import Cuts, WeightSum, accumulated
from pipemesh.schedule import gpipe, one_f_one_b
from tests.recurrent.passes.traced import (
    ROWS,
    WEIGHTS,
    WIDTH,
    traced_stage,
    two_layers,
)

# A dense gradient of half precision, and rows 2, 0 and 2 of a sparse one.
SUMS = [WeightSum(grad, tf.TensorSpec([3]), 0, 0, 0) for grad in ("a:0", ("b:0", "i:0"))]
PASTED = [1, 2, 3], [10.0, 20.0, 40.0], [2, 0, 2]


def sums(before):
    dense, rows, indices = PASTED
    pasted = iter([tf.constant(dense, tf.float16), tf.constant(rows), tf.constant(indices)])
    return accumulated(before, SUMS, ["CPU:0", "CPU:1"], pasted)


def test_sums_are_no_chains_of_additions():
    """The optimizer would make one of them, across what orders actions."""
    with tf.Graph().as_default() as graph:
        sums([tf.zeros([3]), tf.zeros([3])])
        types = {op.type for op in graph.get_operations()}
    assert "AddN" in types and not types & {"Add", "AddV2"}


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


def test_recomputed_layers_start_from_results_of_the_others():
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


def test_without_input_gradients_I_computes_what_weights_share():
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


GPUS = ["GPU:0", "GPU:1"]


def split(theta, carry, inputs, microbatch, step):
    """A product whose inner dim is split over two devices."""
    halves = []
    for device, x, w in zip(GPUS, tf.split(inputs[0], 2, 1), tf.split(theta[0], 2), strict=True):
        with tf.device(device):
            halves.append(tf.matmul(x, w))
    # In a graph of TF1 nobody asks whether there are such devices.
    with tf.Graph().as_default():
        lowering = PlacementLowering(Mesh.from_text("model:2"), LayoutRules(), GPUS)
    whole = lowering.all_reduce(tuple(halves), ["model"], "sum")
    # Both halves are asked for by nobody but the reduction.
    return [tf.tanh(whole[0])], []


def summed(theta, carry, inputs, microbatch, step):
    return [tf.reduce_sum(inputs[0])], []


def graph_of(forward, schedule, **options):
    @tf.function(autograph=False)
    def run(x, w):
        with tf.GradientTape() as tape:
            tape.watch(w)
            stages = [
                Stage("split", forward, [w], [], GPUS[0]),
                Stage("summed", summed, [], [], GPUS[1]),
            ]
            loss, _, _ = pipeline_loss(
                stages, [x], schedule, options=Options(check_numerics="off", **options)
            )
        return loss, tape.gradient(loss, w)

    x, w = tf.TensorSpec([8, 4]), tf.TensorSpec([4, 3])
    return run.get_concrete_function(x, w).graph


def groups(graph):
    """How many operations share each name."""
    return collections.Counter(
        (inside, operation.get_attr("shared_name"))
        for inside, operation in operations_within(graph)
        if operation.type == "NcclAllReduce"
    )


@pytest.mark.parametrize(
    ("build", "remat", "number", "loop", "count"),
    [
        (gpipe, "none", 1, False, 4),
        (one_f_one_b, "full", 2, False, 4),
        (gpipe, "full", 2, True, 1),
        (one_f_one_b, "none", 1, True, 1),
    ],
)
def test_each_action_has_collectives_of_its_own(build, remat, number, loop, count):
    """In a loop, the kinds of actions; TensorFlow tells its repetitions apart."""
    found = groups(graph_of(split, build(2, 4), remat=remat, loop=loop))
    # One where the forward pass is computed again; that of the gradient is no reduction.
    assert len({name for _, name in found}) == count * number
    # No device waits for one that does not come.
    assert set(found.values()) == {2}


def test_collectives_of_an_action_that_is_not_due_are_dead():
    """Even if an input is a constant: the other devices of the group would not come."""

    def masked(theta, carry, inputs, microbatch, step):
        return split(theta, carry, [tf.ones_like(inputs[0])], microbatch, step)

    graph = graph_of(masked, one_f_one_b(2, 4), loop=True)
    collectives = [op for _, op in operations_within(graph) if op.type == "NcclAllReduce"]
    assert len(collectives) >= 2
    for collective in collectives:
        # An argument of the action's function, which hangs on the token of its device.
        assert [op.type for op in collective.control_inputs] == ["Placeholder"]


def test_a_collective_in_a_function_is_an_error():
    @tf.function(autograph=False)
    def inner(x):
        return tf.stop_gradient(collectives.nccl_all_reduce([x, x], GPUS, "sum")[0])

    def hidden(theta, carry, inputs, microbatch, step):
        product = tf.matmul(inputs[0], theta[0])
        return [product + inner(product)], []

    with pytest.raises(PipelineError, match="NcclAllReduce operation, which has side effects"):
        graph_of(hidden, gpipe(2, 4))
