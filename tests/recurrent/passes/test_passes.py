"""A stage's passes over a microbatch, one after the other, give its results and gradients."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend import collectives
from pipemesh.backend.graphs import operations_within
from pipemesh.backend.operations import Call
from pipemesh.errors import PipelineError
from pipemesh.lowering import PlacementLowering
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.recurrent.passes.graph_cut import node_of
from pipemesh.recurrent.passes.passes import Cuts, Part, Passes, accumulated
from pipemesh.recurrent.watch.finite_values import empty_note
from pipemesh.schedule import gpipe, one_f_one_b
from tests.recurrent.passes.traced import (
    DEVICES,
    ROWS,
    WEIGHTS,
    WIDTH,
    X,
    run,
    traced_stage,
    two_layers,
)


def part(has_note):
    """Doubles what it is given second; adds 1 to a note."""
    specs = [tf.TensorSpec([2])] + [tf.TensorSpec([], tf.int64)] * has_note

    def double(x, note=None):
        return [2.0 * x] if note is None else [2.0 * x, note + 1]

    function = tf.function(double, autograph=False).get_concrete_function(*specs)
    call = Call(function, [1, 2][: len(specs)])
    return Part("CPU:2", lambda: call, has_note)


@pytest.mark.parametrize("has_note", [False, True])
def test_a_part_runs_on_its_device_and_hands_the_note_on(has_note):
    with tf.Graph().as_default():
        arguments = [tf.constant([7.0, 7.0]), tf.constant([1.0, 2.0])]
        note = tf.constant(-1, tf.int64)
        results, after = part(has_note)(arguments, note)
        assert (after is note) == (not has_note)
        assert [t.device for t in results] == ["/device:CPU:2"]
        (doubled,), number = run([results, after])
    np.testing.assert_array_equal(doubled, [2.0, 4.0])
    assert number == (0 if has_note else -1)


def test_without_a_note_none_comes_back():
    with tf.Graph().as_default():
        assert part(False)([tf.zeros([2]), tf.zeros([2])])[1] is None


SPECS = [tf.TensorSpec([3]), tf.TensorSpec([3])]
# A dense gradient of half precision, and rows 2, 0 and 2 of a sparse one.
GRADS, PASTED = ["a:0", ("b:0", "i:0")], ([1, 2, 3], [10.0, 20.0, 40.0], [2, 0, 2])


def sums(before):
    dense, rows, indices = PASTED
    pasted = iter([tf.constant(dense, tf.float16), tf.constant(rows), tf.constant(indices)])
    return accumulated(before, GRADS, SPECS, ["CPU:0", "CPU:1"], pasted)


def test_the_first_sums_are_the_gradients_themselves():
    found = sums([None, None])
    assert [t.dtype for t in found] == [tf.float32] * 2
    np.testing.assert_array_equal(found, [[1, 2, 3], [20, 0, 50]])


def test_gradients_are_added_to_sums():
    found = sums([tf.constant([0.5, 0.5, 0.5]), tf.constant([100.0, 200.0, 300.0])])
    np.testing.assert_array_equal(found, [[1.5, 2.5, 3.5], [120, 200, 350]])


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


@pytest.mark.parametrize(("remat", "number"), [("none", 1), ("full", 2)])
@pytest.mark.parametrize("build", [gpipe, one_f_one_b])
@pytest.mark.parametrize(("loop", "count"), [(False, 4), (True, 1)])
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
