"""Communication primitives, their costs, and rules that name no dim.

Their values and gradients are those of all operations (`tests/conformance`).
"""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from pipemesh.lowering import Cores, PlacementLowering, ops
from pipemesh.lowering.simd.collectives import GroupKeys, TfLowering, TpuLowering
from pipemesh.mesh import LayoutRules, Mesh, Shape

MESH = Mesh.from_text("rows:2;cols:4")
DEVICES = [f"CPU:{i}" for i in range(8)]


def make():
    return PlacementLowering(MESH, LayoutRules(), DEVICES)


def different_slices():
    return tuple(tf.random.stateless_normal([4, 8], [i, 0]) for i in range(8))


def test_all_members_of_a_group_get_the_very_same_sum():
    y = make().all_reduce(different_slices(), ["rows", "cols"])
    assert all((part.numpy() == y[0].numpy()).all() for part in y)


@pytest.mark.parametrize(("op", "reduce"), [("max", np.max), ("min", np.min)])
def test_max_and_min_reduce_and_have_no_gradient(op, reduce):
    x = different_slices()
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = make().all_reduce(x, ["cols"], op)
    np.testing.assert_array_equal(y[2], reduce(x[:4], 0))
    np.testing.assert_array_equal(y[6], reduce(x[4:], 0))
    assert tape.gradient(y, x) == (None,) * 8
    with pytest.raises(ValueError, match="known: sum, max, min"):
        make().all_reduce(x, ["cols"], "mean")


def test_costs_tell_axes_primitives_and_passes_apart():
    lowering = make()
    x = different_slices()
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        moved = lowering.all_to_all(x, "cols", 0, 1)
        varied = lowering.vary(x, ["cols", "rows"])
    tape.gradient(moved, x)
    tape.gradient(varied, x)
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


def test_checking_the_rules_finds_all_that_name_nothing():
    for rules in ("batch:data;vocab:model", "batch:data;batches:model", "batch:data;hidden:model"):
        misspelt(rules).numpy()
    x = misspelt("batch:data;vocab:model")
    with pytest.raises(LayoutError, match="'vocab:model' names dim 'vocab', which no tensor has"):
        x.lowering.check_rules()
    with pytest.raises(LayoutError, match="did you mean 'batch'"):
        misspelt().lowering.check_rules()
    misspelt("batch:data;hidden:model").lowering.check_rules()


def test_misspelt_rule_is_warned_of_after_a_cores_program():
    def program(lowering, array):
        return ops.import_tensor(lowering, array, "batch:2").slices[0]

    cores = Cores(Mesh.from_text("data:1"), ["CPU:0"])
    rules, array = LayoutRules.from_text("bacth:data"), tf.ones([2])
    with pytest.warns(UserWarning, match=MISSPELT):
        cores.function(program, rules, tf.TensorSpec([2]))
    with pytest.warns(UserWarning, match=MISSPELT):
        cores.run_eagerly(program, rules, [[array]])


def test_with_split_hidden_units_activations_are_summed_as_well():
    """The table is that of the README."""
    mesh, rules = Mesh.from_text("data:2;model:2"), LayoutRules.from_text("batch:data;hidden:model")
    lowering = PlacementLowering(mesh, rules, DEVICES[:4])
    a = ops.import_tensor(lowering, tf.ones([64, 32]), "batch:64;io:32")
    weights = [
        ops.import_tensor(lowering, tf.ones([32, 128]), "io:32;hidden:128"),
        ops.import_tensor(lowering, tf.ones([128, 8]), "hidden:128;classes:8"),
    ]
    with tf.GradientTape() as tape:
        tape.watch(weights)
        hidden = ops.relu(ops.einsum([a, weights[0]], ["batch", "hidden"]))
        logits = ops.einsum([hidden, weights[1]], ["batch", "classes"])
        loss = ops.reduce_mean(ops.square(ops.log_softmax(logits, "classes")))
    tape.gradient(loss, weights)
    assert str(lowering.costs) == (
        "axes   primitive   pass      calls   bytes\n"
        "data   all_reduce  backward      2  10,240\n"
        "data   all_reduce  forward       1       4\n"
        "model  all_reduce  forward       1   1,024\n"
        "total                            4  11,268\n"
        "\n"
        "split over  operation    pass      calls    flops  bytes of memory\n"
        "data+model  einsum       backward      2  196,608           43,008\n"
        "data+model  einsum       forward       2  163,840           31,744\n"
        "data+model  relu         backward      1    2,048           16,384\n"
        "data+model  relu         forward       1    2,048           16,384\n"
        "data        log_softmax  forward       1      864            5,504\n"
        "data        log_softmax  backward      1      800            6,016\n"
        "data        reduce_mean  backward      1      257            1,036\n"
        "data        reduce_mean  forward       1      257            1,036\n"
        "data        square       backward      1      256            2,048\n"
        "data        square       forward       1      256            2,048\n"
        "total                                 12  367,234          125,208\n"
        "flops that all devices along an axis compute alike: data 0.0%, model 0.7%"
    )


@pytest.mark.parametrize("dtype", [tf.float32, tf.bfloat16, tf.int8])
def test_permutes_of_tensorflow_count_as_all_gathers(dtype):
    mesh = Mesh.from_text("ring:4")
    core = tf.constant(0)
    token = tf.Variable(0.0)

    def sent(lowering):
        @tf.function(autograph=False)
        def program(x):
            return lowering.shift((x,), "ring", 1, wrap=True)

        program.get_concrete_function(tf.TensorSpec([2, 5], dtype))
        ((key, value),) = lowering.costs.rows.items()
        assert key == (("ring",), "permute", "forward")
        return value

    tensorflow = TfLowering(mesh, LayoutRules(), core, token.handle, GroupKeys(mesh))
    assert sent(tensorflow) == (1, 3 * 10 * 4)
    assert sent(TpuLowering(mesh, LayoutRules(), core)) == (1, 10 * dtype.size)
