"""The communication primitives and their gradients, on slices, and their costs."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import DeviceError, LayoutError, MeshError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.lowering.simd.tf_collectives import GroupKeys, TfCollectives
from pipemesh.lowering.simd.tpu_collectives import TpuCollectives
from pipemesh.mesh import LayoutRules, Mesh, Shape

MESH = Mesh.from_text("rows:2;cols:4")
DEVICES = [f"CPU:{i}" for i in range(8)]


def make(rules=""):
    return PlacementLowering(MESH, LayoutRules.from_text(rules), DEVICES)


def different_slices(shape=(4, 8)):
    draw = np.random.default_rng(0).standard_normal((8, *shape)).astype(np.float32)
    return tuple(tf.constant(part) for part in draw)


def value_and_gradient(function, slices, cotangents):
    with tf.GradientTape() as tape:
        tape.watch(slices)
        outputs = function(slices)
    grads = tape.gradient(outputs, slices, output_gradients=list(cotangents))
    return [np.stack([t.numpy() for t in part]) for part in (outputs, grads)]


def grid(array):
    return np.asarray(array).reshape(2, 4, *np.asarray(array).shape[1:])


def test_all_reduce_sums_forward_and_leaves_gradients_alone():
    x, dy = different_slices(), different_slices()
    y, dx = value_and_gradient(lambda s: make().all_reduce(s, ["cols"]), x, dy)
    want = np.broadcast_to(grid(x).sum(1, keepdims=True), grid(x).shape)
    np.testing.assert_allclose(grid(y), want, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(dx, dy)


def test_all_members_of_a_group_get_the_very_same_sum():
    y = make().all_reduce(different_slices(), ["rows", "cols"])
    assert all((part.numpy() == y[0].numpy()).all() for part in y)


def test_vary_leaves_values_alone_and_sums_gradients():
    x, dy = different_slices(), different_slices()
    y, dx = value_and_gradient(lambda s: make().vary(s, ["rows"]), x, dy)
    want = np.broadcast_to(grid(dy).sum(0, keepdims=True), grid(dy).shape)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_allclose(grid(dx), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("op", "reduce"), [("max", np.max), ("min", np.min)])
def test_max_and_min_reduce_and_have_no_gradient(op, reduce):
    x = different_slices()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = make().all_reduce(x, ["cols"], op)
    np.testing.assert_array_equal(grid(y)[:, 2], reduce(grid(x), 1))
    assert tape.gradient(y, x) == (None,) * 8


def test_gather_and_slice_are_each_others_gradient():
    x, whole = different_slices((4, 2)), different_slices((4, 8))
    gather = lambda s: make().all_gather(s, "cols", 1)  # noqa: E731
    cut = lambda s: make().slice_along(s, "cols", 1)  # noqa: E731
    y, dx = value_and_gradient(gather, x, whole)
    np.testing.assert_array_equal(grid(y)[1, 2], np.concatenate(list(grid(x)[1]), 1))
    np.testing.assert_array_equal(grid(dx)[1, 2], grid(whole)[1, 2][:, 4:6])
    y, dx = value_and_gradient(cut, whole, x)
    np.testing.assert_array_equal(grid(y)[1, 2], grid(whole)[1, 2][:, 4:6])
    np.testing.assert_array_equal(grid(dx)[1, 2], np.concatenate(list(grid(x)[1]), 1))


def test_all_to_all_moves_a_split_and_its_gradient_moves_it_back():
    x, dy = different_slices((4, 2)), different_slices((1, 8))
    y, dx = value_and_gradient(lambda s: make().all_to_all(s, "cols", 0, 1), x, dy)
    for row in range(2):
        whole = np.concatenate(list(grid(x)[row]), 1)
        np.testing.assert_array_equal(np.concatenate(list(grid(y)[row]), 0), whole)
        whole = np.concatenate(list(grid(dy)[row]), 0)
        np.testing.assert_array_equal(np.concatenate(list(grid(dx)[row]), 1), whole)


def test_shift_sends_up_and_its_gradient_sends_down():
    x, dy = different_slices(), different_slices()
    y, dx = value_and_gradient(lambda s: make().shift(s, "cols", 1, wrap=False), x, dy)
    np.testing.assert_array_equal(grid(y)[:, 1:], grid(x)[:, :-1])
    assert not grid(y)[:, 0].any()
    np.testing.assert_array_equal(grid(dx)[:, :-1], grid(dy)[:, 1:])
    y, _ = value_and_gradient(lambda s: make().shift(s, "cols", -1, wrap=True), x, dy)
    np.testing.assert_array_equal(grid(y), np.roll(grid(x), -1, axis=1))


def test_costs_tell_axes_primitives_and_passes_apart():
    lowering = make()
    x = different_slices((4, 8))
    value_and_gradient(lambda s: lowering.all_to_all(s, "cols", 0, 1), x, different_slices((1, 32)))
    value_and_gradient(lambda s: lowering.vary(s, ["cols", "rows"]), x, x)
    lowering.all_gather(x, "rows", 0)
    size = 4 * 8 * 4
    assert lowering.costs.rows == {
        (("cols",), "all_to_all", "forward"): (1, size * 3 // 4),
        (("cols",), "all_to_all", "backward"): (1, size * 3 // 4),
        (("rows", "cols"), "all_reduce", "backward"): (1, 2 * size * 7 // 8),
        (("rows",), "all_gather", "forward"): (1, size),
    }
    assert lowering.costs.bytes("rows") == 2 * size * 7 // 8 + size
    assert lowering.costs.calls("all_to_all") == 2
    lowering.costs.clear()
    assert lowering.costs.total_bytes == 0


def test_an_axis_of_size_one_costs_nothing():
    lowering = PlacementLowering(Mesh.from_text("data:1"), LayoutRules(), ["CPU:0"])
    x = (tf.ones([2]),)
    for same in (
        lowering.all_reduce(x, ["data"]),
        lowering.vary(x, ["data"]),
        lowering.all_gather(x, "data", 0),
        lowering.shift(x, "data", 0, wrap=True),
    ):
        np.testing.assert_array_equal(same[0], x[0])
    assert not lowering.costs.rows


@pytest.mark.parametrize(
    ("error", "call", "message"),
    [
        (DeviceError, lambda: PlacementLowering(MESH, LayoutRules(), DEVICES[:7]), "7 devices"),
        (LayoutError, lambda: make("x:row"), "did you mean 'rows'"),
        (MeshError, lambda: make().all_reduce(different_slices(), ["col"]), "mean 'cols'"),
        (LayoutError, lambda: make().slice_along(different_slices((6,)), "cols", 0), "size 6"),
        (
            LayoutError,
            lambda: make().permute(different_slices(), "cols", [(0, 1), (2, 1)]),
            "no permutation along axis 'cols'",
        ),
        (ValueError, lambda: make().all_reduce(different_slices(), ["rows"], "mean"), "known: sum"),
    ],
)
def test_what_cannot_be_lowered_is_an_error_that_says_why(error, call, message):
    with pytest.raises(error, match=message):
        call()


MISSPELT = r"rule 'bacth:data' names dim 'bacth'.* dim 'batch', which has no rule, is not split"


def misspelt(rules="bacth:data;hidden:model", shape="batch:4;hidden:2"):
    mesh = Mesh.from_text("data:2;model:2")
    lowering = PlacementLowering(mesh, LayoutRules.from_text(rules), DEVICES[:4])
    return ops.import_tensor(lowering, tf.ones(Shape.from_text(shape).sizes), shape)


@pytest.mark.parametrize(
    "leave",
    [
        ops.export_tensor,
        lambda x: x.numpy(),
        lambda x: float(ops.reduce_sum(x)),
        lambda x: tf.function(lambda: ops.export_tensor(x), autograph=False)(),
    ],
)
def test_a_misspelt_rule_is_warned_of_when_results_leave(leave):
    x = misspelt()
    with pytest.warns(UserWarning, match=MISSPELT):
        leave(x)
    # Once is enough, and the filter of all tests makes a second one an error.
    leave(x)


def test_a_rule_for_dims_that_just_do_not_occur_is_left_alone():
    for rules in ("batch:data;vocab:model", "batch:data;batches:model", ""):
        misspelt(rules).numpy()


def test_checking_the_rules_finds_all_that_name_nothing():
    x = misspelt("batch:data;vocab:model")
    with pytest.raises(LayoutError, match="'vocab:model' names dim 'vocab', which no tensor has"):
        x.lowering.check_rules()
    with pytest.raises(LayoutError, match="did you mean 'batch'"):
        misspelt().lowering.check_rules()
    misspelt("batch:data;hidden:model").lowering.check_rules()


def test_a_misspelt_rule_is_warned_of_at_the_end_of_a_cores_program():
    def program(lowering, array):
        return ops.import_tensor(lowering, array, "batch:2").slices[0]

    cores = Cores(Mesh.from_text("data:1"), ["CPU:0"])
    rules, array = LayoutRules.from_text("bacth:data"), tf.ones([2])
    with pytest.warns(UserWarning, match=MISSPELT):
        cores.function(program, rules, tf.TensorSpec([2]))
    with pytest.warns(UserWarning, match=MISSPELT):
        cores.run_eagerly(program, rules, [[array]])


def table(layout):
    """Of a training step of a network of two layers, on four devices."""
    mesh, rules = Mesh.from_text("data:2;model:2"), LayoutRules.from_text(layout)
    lowering = PlacementLowering(mesh, rules, [f"CPU:{i}" for i in range(4)])

    @tf.function(autograph=False)
    def step(x, w1, w2):
        with tf.GradientTape() as tape:
            tape.watch([w1, w2])
            a = ops.import_tensor(lowering, x, "batch:64;io:32")
            first = ops.import_tensor(lowering, w1, "io:32;hidden:128")
            second = ops.import_tensor(lowering, w2, "hidden:128;classes:8")
            hidden = ops.relu(ops.einsum([a, first], ["batch", "hidden"]))
            logits = ops.einsum([hidden, second], ["batch", "classes"])
            loss = ops.export_tensor(
                ops.reduce_mean(ops.square(ops.log_softmax(logits, "classes")))
            )
        return tape.gradient(loss, [w1, w2])

    step.get_concrete_function(*(tf.TensorSpec(sizes) for sizes in ([64, 32], [32, 128], [128, 8])))
    return str(lowering.costs)


def test_data_parallel_training_sums_the_gradients_of_weights():
    assert table("batch:data") == (
        "axes   primitive   pass      calls   bytes\n"
        "data   all_reduce  backward      2  20,480\n"
        "data   all_reduce  forward       1       4\n"
        "total                            3  20,484"
    )


def test_with_split_hidden_units_activations_are_summed_as_well():
    assert table("batch:data;hidden:model") == (
        "axes   primitive   pass      calls   bytes\n"
        "data   all_reduce  backward      2  10,240\n"
        "data   all_reduce  forward       1       4\n"
        "model  all_reduce  forward       1   1,024\n"
        "total                            4  11,268"
    )


@pytest.mark.parametrize(
    ("dtype", "bytes_of_an_element"), [(tf.float32, 4), (tf.bfloat16, 4), (tf.int8, 4)]
)
def test_a_permute_of_tensorflows_collectives_is_counted_as_the_all_gather_that_it_is(
    dtype, bytes_of_an_element
):
    mesh = Mesh.from_text("ring:4")
    core = tf.constant(0)
    token = tf.Variable(0.0)

    def sent(collectives):
        lowering = SimdLowering(mesh, LayoutRules(), collectives, core)

        @tf.function(autograph=False)
        def program(x):
            return lowering.shift((x,), "ring", 1, wrap=True)

        program.get_concrete_function(tf.TensorSpec([2, 5], dtype))
        ((key, value),) = lowering.costs.rows.items()
        assert key == (("ring",), "permute", "forward")
        return value

    tensorflow = TfCollectives(mesh, core, token.handle, GroupKeys(mesh))
    assert sent(tensorflow) == (1, 3 * 10 * bytes_of_an_element)
    assert sent(TpuCollectives(mesh)) == (1, 10 * dtype.size)
