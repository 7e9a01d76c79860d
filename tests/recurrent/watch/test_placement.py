"""Reports of what ran where, read from graphs."""

import re

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend.graphs import operations_within, record_placement
from pipemesh.errors import DeviceError, PipelineError
from pipemesh.randomness import layer_scope
from pipemesh.recurrent import Options, Placement, Stage, pipeline_loss
from pipemesh.recurrent.watch.placement import check_devices, einsum_error
from pipemesh.schedule import forward_only, one_f_one_b

X = np.ones([4, 2], np.float32)
WEIGHT = np.random.default_rng(0).normal(size=[4, 4]).astype(np.float32)


def run(change, device="CPU:1", strict=True, schedule=None):
    """One stage that scales and one that changes what it gets; returns the traced function."""

    def scale(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0]], []

    def head(theta, carry, inputs, microbatch, step):
        with layer_scope("layer"):
            return [tf.reduce_sum(change(inputs[0] * theta[0]))], []

    weights = [tf.Variable(1.0), tf.Variable(2.0)]

    @tf.function(autograph=False)
    def step():
        with tf.GradientTape() as tape:
            theta = [[tf.convert_to_tensor(w)] for w in weights]
            stages = [
                Stage("scale", scale, theta[0], [], "CPU:0"),
                Stage("head", head, theta[1], [], device),
            ]
            loss, _, _ = pipeline_loss(
                stages,
                [tf.constant(X)],
                schedule or one_f_one_b(2, 2),
                options=Options(strict_devices=strict),
            )
        return loss if schedule else [loss, *tape.gradient(loss, weights)]

    return step


def on_another_device(x):
    with tf.device("CPU:3"):
        return tf.sin(x)


def in_a_loop(x):
    return tf.while_loop(lambda i, x: i < 2, lambda i, x: (i + 1, on_another_device(x)), (0, x))[1]


def on_the_host(x):
    return tf.numpy_function(np.sin, [x], tf.float32, stateful=False)


def on_a_gpu_alone(x):
    """TensorFlow has this operation for GPUs only."""
    x = tf.reshape(x, [1, 1, 2, 2])
    y, *_ = tf.raw_ops.CudnnRNN(
        input=x[0], input_h=x[0], input_c=x[0], params=tf.reshape(x, [-1]), is_training=True
    )
    return y


def of_bytes(x):
    return tf.cast(tf.matmul(*[tf.cast(x, tf.uint8)] * 2), tf.float32)


PINNED = (
    r"operation '.*Sin.*' \(Sin\) of stage 'head' is pinned to .*CPU:3, but the stage is on CPU:1; "
    r"take tf\.device out"
)


# Tracing needs no GPU.
@pytest.mark.parametrize(
    ("change", "device", "text"),
    [
        (on_another_device, "CPU:1", PINNED),
        (in_a_loop, "CPU:1", PINNED),
        (on_the_host, "GPU:0", r"\(PyFuncStateless\) of stage 'head' has no kernel for"),
        (on_a_gpu_alone, "CPU:1", r"\(CudnnRNN\) .* no kernel for CPU .* run on GPU, but"),
        (of_bytes, "CPU:1", "no kernel for CPU with these types"),
        (tf.sin, "", "stage 'head' has the device '', but strict_devices"),
    ],
)
def test_operations_that_do_not_run_on_the_stages_device_are_named(change, device, text):
    with pytest.raises(DeviceError, match=text):
        run(change, device, schedule=forward_only(2, 2)).get_concrete_function()


@pytest.mark.parametrize(
    ("homes", "loop"),
    [(["GPU:0", "GPU:1"], False), ([("GPU:0", "GPU:1"), ("GPU:2", "GPU:3")], True)],
)
def test_every_operation_on_a_gpu_has_a_kernel(homes, loop):
    """Batches of integers were split, and checks compared, by operations that only CPUs have."""

    def first(theta, carry, inputs, microbatch, step):
        return [inputs[0] * theta[0], *inputs[1:]], []

    def head(theta, carry, inputs, microbatch, step):
        x, labels, mask = inputs
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, x * theta[0])
        return [tf.reduce_sum(tf.where(mask, losses, 0.0))], []

    weights = [tf.Variable(1.0), tf.Variable(2.0)]

    @tf.function(autograph=False)
    def step(x, labels, mask):
        with tf.GradientTape() as tape:
            stages = [
                Stage(name, forward, [tf.convert_to_tensor(weight)], [], home)
                for name, forward, weight, home in zip(
                    ("first", "head"), (first, head), weights, homes, strict=True
                )
            ]
            options = Options(loop=loop, compute_dtype="bfloat16", check_numerics="all")
            loss, _, _ = pipeline_loss(
                stages, [x, labels, mask], one_f_one_b(2, 2), options=options
            )
        return loss, tape.gradient(loss, weights)

    # Tracing needs no GPU, and TensorFlow registers kernels of GPUs without one.
    specs = [tf.TensorSpec([8, 4]), tf.TensorSpec([8], tf.int32), tf.TensorSpec([8], tf.bool)]
    operations = list(operations_within(step.get_concrete_function(*specs).graph))
    checked = [op for _, op in operations if "GPU" in op.device]
    assert len(checked) > 100
    for op in checked:
        check_devices("any", op.device, [op.node_def])


def test_a_step_that_stays_on_its_devices_passes_and_is_reported():
    step = run(tf.sin)
    with record_placement() as metadata:
        step()
    placement = Placement.of(metadata, ["CPU:0", "/job:localhost/task:0/device:CPU:1"])
    placement.check()
    assert [list(found) for found in placement.found] == [["CPU:0"], ["CPU:1"]]
    assert re.fullmatch(
        r"stage 0 on CPU:0: \d+ operations\nstage 1 on CPU:1: \d+ operations", str(placement)
    )
    # TensorFlow places a function once.
    with record_placement() as later:
        step()
    with pytest.raises(DeviceError, match="knows no operation of stage 0; record the first step"):
        Placement.of(later, ["CPU:0", "CPU:1"])


def test_the_report_finds_what_strayed():
    step = run(on_another_device, strict=False)
    with record_placement() as metadata:
        np.testing.assert_allclose(step()[0], 8 * np.sin(2), rtol=1e-6)
    placement = Placement.of(metadata, ["CPU:0", "CPU:1"])
    assert set(placement.found[1]) == {"CPU:1", "CPU:3"}
    assert "operations, and " in str(placement)
    with pytest.raises(DeviceError, match="of stage 1 ran on CPU:3 instead of CPU:1"):
        placement.check()


def test_every_matmul_of_a_tf1_session_runs_on_its_stage_device():
    def layer(theta, carry, inputs, microbatch, step):
        return [tf.tanh(tf.matmul(inputs[0], theta[0]))], []

    def squares(*arguments):
        (y,), carry = layer(*arguments)
        return [tf.reduce_sum(y**2)], carry

    with tf.Graph().as_default():
        x = tf.compat.v1.placeholder(tf.float32, X.shape)
        weight = tf.constant(WEIGHT[:2, :2])
        stages = [
            Stage("layer", layer, [weight], [], "CPU:1"),
            Stage("squares", squares, [weight], [], "CPU:2"),
        ]
        loss, _, _ = pipeline_loss(stages, [x], one_f_one_b(2, 2))
        options = tf.compat.v1.RunOptions(output_partition_graphs=True)
        metadata = tf.compat.v1.RunMetadata()
        config = tf.compat.v1.ConfigProto(device_count={"CPU": 4})
        with tf.compat.v1.Session(config=config) as session:
            fetches = [loss, *tf.gradients(loss, [x, weight])]
            session.run(fetches, {x: X}, options=options, run_metadata=metadata)
    placement = Placement.of(metadata, ["CPU:1", "CPU:2"])
    placement.check()
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    products = [node.device[-1] for node in nodes if "MatMul" in node.op]
    # Of two microbatches the forward pass, the same again, and both gradients.
    assert sorted(products) == ["1"] * 8 + ["2"] * 8


def train(product, dtype=tf.float16):
    def forward(theta, carry, inputs, microbatch, step):
        return [tf.reduce_sum(product(inputs[0], theta[0]))], []

    @tf.function(autograph=False)
    def step():
        stages = [Stage("s0", forward, [tf.constant(WEIGHT)], [], "CPU:0")]
        return pipeline_loss(
            stages, [tf.ones([4, 3, 4])], one_f_one_b(1, 2), options=Options(compute_dtype=dtype)
        )[0]

    return step()


def spelt(x, w):
    return tf.einsum("abi,ij->abj", x, w)


def ellipsis(x, w):
    return tf.einsum("...i,ij->...j", x, w)


def in_a_branch(x, w):
    return tf.cond(tf.reduce_all(tf.math.is_finite(x)), lambda: ellipsis(x, w), lambda: x)


@pytest.mark.parametrize("product", [ellipsis, in_a_branch])
def test_an_einsum_that_this_cpu_gets_wrong_is_refused(monkeypatch, product):
    monkeypatch.setattr("pipemesh.recurrent.watch.placement.einsum_error", lambda _: 1.38)
    with pytest.raises(PipelineError, match=r"an einsum '.*spell the dims.*ONEDNN"):
        train(product)
    train(spelt)
    train(product, tf.bfloat16)


def test_what_is_tried_is_what_the_kernel_does():
    equation = "...i,ij->...j"
    x = np.random.default_rng(1).normal(size=[2, 3, 4]).astype(np.float16)
    found = tf.einsum(equation, x, WEIGHT.astype(np.float16))
    off = np.abs(np.einsum(equation, x.astype(np.float64), WEIGHT) - found).max()
    assert (off > 0.1) == (einsum_error(equation) > 0.1)
    for other in ("...j,ij...->...i", "...ij,...jk->...ik"):
        assert einsum_error(other) >= 0


def test_a_trained_stage_with_an_ellipsis_is_right_or_refused():
    wanted = float(train(spelt))
    try:
        assert float(train(ellipsis)) == pytest.approx(wanted, rel=1e-2)
    except PipelineError as error:
        assert "einsum" in str(error)


def test_other_tasks_are_told_apart():
    found = tf.compat.v1.RunMetadata()
    device = "/job:worker/replica:0/task:1/device:GPU:0"
    found.partition_graphs.add().node.add(name="action_0F0/x", device=device, op="Mul")
    Placement.of(found, ["/job:worker/task:1/device:GPU:0"]).check()
    with pytest.raises(DeviceError, match="instead of GPU:0"):
        Placement.of(found, ["GPU:0"]).check()
