"""Where does the communication happen? A table for a model."""

import pytest
import tensorflow as tf

from pipemesh.lowering import PlacementLowering, ops
from pipemesh.lowering.simd.collectives import GroupKeys, TfCollectives, TpuCollectives
from pipemesh.lowering.simd.simd_lowering import SimdLowering
from pipemesh.mesh import LayoutRules, Mesh


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
