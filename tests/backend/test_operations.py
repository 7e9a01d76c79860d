"""Operations of every action: how many there are, and the values that they pass on."""

import collections

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import record_placement
from pipemesh.backend.operations import (
    Call,
    add_rows,
    anchor,
    pin,
    pin_present,
    sum_in_order,
    table,
    zeros,
)
from pipemesh.recurrent import Options, Stage, pipeline_loss
from pipemesh.schedule import one_f_one_b, zb_h1


def test_a_pin_keeps_values_and_shapes_in_its_own_operation():
    @tf.function
    def run(x):
        two = tf.constant([1, 2])
        (one,) = pin([x])
        both = pin([x, two])
        some = pin_present([None, x, None])
        assert pin([]) == []
        assert [t.shape for t in (one, *both)] == [[3], [3], [2]]
        assert [t is None for t in some] == [True, False, True]
        assert len({t.op.name for t in (x, two, one, both[0], some[1])}) == 5
        assert both[0].op is both[1].op
        return one, *both, some[1]

    got = run(tf.constant([1.0, 2.0, 3.0]))
    assert [t.numpy().tolist() for t in got] == [[1, 2, 3], [1, 2, 3], [1, 2], [1, 2, 3]]


def run_in_session(tensor):
    with tf.compat.v1.Session(graph=tensor.graph) as session:
        return session.run(tensor)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.float32])
def test_tables_are_constants_of_their_rows(dtype):
    rows = np.asarray([[1, 0, 1], [0, 0, 1]], dtype)
    # Not in the order in which rows lie in memory.
    for given in (rows, np.transpose(rows)):
        with tf.Graph().as_default():
            found = table(given)
            assert found.dtype == dtype and found.shape == given.shape
            np.testing.assert_array_equal(run_in_session(found), given)


def test_an_anchor_stays_on_its_device_with_one_user():
    """A pin would be passed by, and the switch would lie where its data are made."""
    with tf.Graph().as_default():
        with tf.device("CPU:1"):
            held = anchor(tf.constant([1.0, 2.0]))
        assert held.shape == [2] and held.device.endswith("CPU:1")
        assert held.op.type == "PlaceholderWithDefault"

    @tf.function
    def run(x):
        return anchor(x)

    assert run(tf.constant([4.0])).numpy().tolist() == [4]


def called(outside):
    """A call of a function that captures a tensor."""
    function = tf.function(lambda a, b: [a - b + outside, a * b])
    spec = tf.TensorSpec([])
    return Call(function.get_concrete_function(spec, spec))


def test_a_call_captures_in_any_graph():
    call = called(tf.constant(10.0))

    @tf.function
    def run(*values):
        inner = tf.while_loop(
            lambda i, _: i < 2, lambda i, x: (i + 1, call([x, x])[0]), (0, values[0])
        )
        return [*call([values[2], values[0]]), inner[1]]

    assert [float(t) for t in run(*map(tf.constant, (1.0, 2.0, 3.0)))] == [12.0, 3.0, 10.0]
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        call = called(tf.constant(10.0))
        assert session.run(call([tf.constant(3.0), tf.constant(1.0)])) == [12.0, 3.0]


@pytest.mark.parametrize(
    ("build", "most"), [(one_f_one_b, {"F": 3, "B": 4}), (zb_h1, {"F": 3, "I": 4, "W": 3})]
)
def test_an_action_is_few_operations(build, most):
    schedule = build(4, 8)
    last = schedule.num_stages - 1

    def dense(number):
        def forward(theta, carry, inputs, microbatch, step):
            y = tf.tanh(tf.matmul(inputs[0], theta[0]) + theta[1])
            return [tf.reduce_sum(y) if number == last else y], []

        return forward

    @tf.function
    def run(x):
        with tf.GradientTape() as tape:
            stages = [
                Stage(f"s{i}", dense(i), [tf.eye(4), tf.zeros([4])], [], "CPU:0")
                for i in range(schedule.num_stages)
            ]
            tape.watch([t for stage in stages for t in stage.theta])
            loss, _, _ = pipeline_loss(stages, [x], schedule, options=Options(remat="none"))
        return tape.gradient(loss, stages[0].theta[0])

    graph = run.get_concrete_function(tf.TensorSpec([16, 4])).graph
    count = collections.Counter()
    for operation in graph.get_operations():
        scope, _, name = operation.name.partition("/")
        # The number of a microbatch is one constant for all actions of a device.
        if scope.startswith("action_") and not name.startswith("Const"):
            count[scope] += 1
            if operation.type == "PartitionedCall" and "W" in scope:
                assert {t.shape.rank for t in operation.inputs} <= {1, 2}, "no scalars, no weights"
    assert len(count) == len(most) * 4 * 8
    for scope, number in count.items():
        assert number <= most[scope.removeprefix("action_")[1]], scope


# The sum of these from left to right is 1, from right to left 0.
FIRST, SECOND, THIRD = 1e8, -1e8, 1.0


def value(sum_of, *given):
    """Sums in a graph where only the memory of the last addend may be reused."""

    @tf.function
    def added(first, second, third):
        return sum_of([first, second, tf.sqrt(third)])

    return float(added(*map(tf.constant, given)))


def test_add_n_of_tensorflow_depends_on_free_memory():
    """If this fails, TensorFlow adds in order, and `sum_in_order` may go."""
    assert value(tf.add_n, FIRST, SECOND, THIRD) == 0


def test_it_adds_from_the_first_to_the_last():
    assert value(sum_in_order, FIRST, SECOND, THIRD) == 1
    tensors = [tf.constant(x) for x in (FIRST, SECOND, THIRD)]
    assert float(sum_in_order(tensors)) == 1
    assert sum_in_order(tensors[:1]) is tensors[0]


def test_additions_before_it_are_not_merged_with_it():
    def total(*given):
        a, b, c, d = map(tf.sqrt, given)
        return sum_in_order([tf.add_n([a, b, c]), d])

    given = [tf.constant([4.0, 9.0])] * 4
    with record_placement() as graphs:
        tf.function(total)(*given)
    nodes = [node for graph in graphs.partition_graphs for node in graph.node]
    assert sorted(node.attr["N"].i for node in nodes if node.op == "AddN") == [2, 3]


@pytest.mark.parametrize(
    "device, kind", [("/device:CPU:0", "InplaceAdd"), ("/device:GPU:0", "TensorScatterAdd")]
)
def test_rows_of_equal_indices_are_all_added(device, kind):
    """`InplaceAdd` of a GPU loses all but one, wherever the rows come from."""

    @tf.function(autograph=False)
    def run(at):
        total = zeros(tf.TensorSpec([3, 2]))
        for number in range(2):
            with tf.device("CPU:0"):
                rows = tf.fill([3, 2], 1.0 + number)
            total = add_rows(total, at, rows, device)
        return total

    for dtype in (tf.int32, tf.int64):
        made = run.get_concrete_function(tf.TensorSpec([3], dtype))
        (added, last) = [op for op in made.graph.get_operations() if "Add" in op.type]
        assert added.type == last.type == kind and last.device == device
        if kind == "InplaceAdd":
            want = [[3.0, 3.0], [0.0, 0.0], [6.0, 6.0]]
            np.testing.assert_array_equal(made(tf.constant([2, 0, 2], dtype)), want)
