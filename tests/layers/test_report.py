"""What is said of a step before it runs: closed forms, and what its graph shows."""

import functools

import pytest
import tensorflow as tf
from lingvo.core import layers, py_utils, tshape

from pipemesh.layers import Report, report
from pipemesh.layers.named import TransformerBlock
from pipemesh.text import bytes_text
from tests.layers.harness import executing
from tests.layers.stacks import stack_of

BATCH, LENGTH, EMBED, HEADS, HIDDEN = 8, 6, 8, 2, 16
MICROBATCHES, STAGES = 2, 2


class Head(layers.base_layer.BaseLayer):
    """A loss for each microbatch."""

    takes_slices = True

    def FProp(self, theta, x):
        del theta
        return tf.reduce_sum(x), tf.constant(1.0)

    @classmethod
    def FPropMeta(cls, p, x):
        return py_utils.NestedMap(flops=0, out_shapes=(tshape.Shape([]), tshape.Shape([])))


@functools.cache
def reported(mesh, **changes):
    """The report of two stages of one block each, and the layer."""
    block = TransformerBlock.Params().Set(input_dim=EMBED, num_heads=HEADS, hidden_dim=HIDDEN)
    sub = [*(block.Copy().Set(name=f"block{i}") for i in range(2)), Head.Params().Set(name="head")]
    options = {"num_micro_batches": MICROBATCHES, "loss_inside": True, "schedule": "1f1b"}
    params = stack_of(sub, [0, 1, 3], remat="none", **(options | changes))
    found = []
    with executing(True, mesh):
        layer = params.Instantiate()
        size = BATCH // MICROBATCHES // layer.StageHomes()[0].num_replicas
        shape = tshape.Shape([size, LENGTH, EMBED])
        layer.noted_run = lambda run: found.append(
            report(layer, run, [shape], layer.vars.Flatten())
        )

        @tf.function(autograph=False)
        def step(x):
            with tf.GradientTape() as tape:
                loss = layer.FPropDefaultTheta(x)[0]
            return tape.gradient(loss, layer.vars.Flatten())

        step.get_concrete_function(tf.TensorSpec([BATCH, LENGTH, EMBED]))
    return found[0], layer


SIZE = BATCH * LENGTH * EMBED * 4
BETWEEN = {"activations": (MICROBATCHES, SIZE), "gradients": (MICROBATCHES, SIZE)}


def sent(found, axes):
    return {s.what: (s.times, s.bytes) for s in found.sent if s.axes == axes}


def bytes_of(layer):
    return sum(v.shape.num_elements() * 4 for v in layer.vars.Flatten())


def test_along_model_there_are_megatrons_four_reductions_a_block():
    found, layer = reported("layers:2;model:2 heads:model;d_ff:model")
    # Half a tensor twice on each of the two devices of each stage: as much as a tensor each.
    reductions = (2 * MICROBATCHES, 2 * 2 * STAGES * SIZE)
    assert sent(found, "model") == {
        "all_reduce forward": reductions,
        "all_reduce backward": reductions,
        **{k: v for k, v in sent(found, "model").items() if k == "weights"},
    }
    lying = {w.name: w for w in found.weights}
    assert sum(w.bytes for w in found.weights) == bytes_of(layer)
    w_q = lying["stack.s1.block1.attention.w_q"]
    assert (w_q.shape, w_q.cut) == ("embed:8;heads:2;head_dim:4", "heads/2")
    assert w_q.devices == ("CPU:2", "CPU:3") and w_q.bytes == 4 * EMBED * EMBED
    scale = lying["stack.s0.block0.attention_norm.scale"]
    assert (scale.cut, scale.devices) == ("", ("CPU:0",))
    # And it can be read.
    lines = str(found).splitlines()
    assert lines[0].split() == "device weights optimizer gradients activations in all".split()
    assert len([line for line in lines if line.startswith("CPU:")]) == 4
    assert any(line.split()[:4] == ["model", "all_reduce", "forward", "4"] for line in lines)
    assert lines[-1] == "bubble 33.3%"
    first = found.layout().splitlines()
    assert first[0].split() == ["weight", "shape", "cut", "bytes", "devices"]
    assert any("heads/2" in line for line in first)


def test_homes_of_unequal_shape():
    found, layer = reported("layers:2;model:2,1 heads:model;d_ff:model")
    # Equal on both devices of the first stage, so it goes over once, and reductions are its own.
    assert sent(found, "layers") == BETWEEN
    assert sent(found, "model")["all_reduce forward"] == (2 * MICROBATCHES, 2 * 2 * SIZE)
    assert [m.device for m in found.memory] == ["CPU:0", "CPU:1", "CPU:2"]
    assert found.memory[2].weights == bytes_of(layer.children["s1"])
    # Two devices take half the time, so the other one is busy all the time but at the first turn.
    half, whole = 3 * MICROBATCHES / 2, 3 * MICROBATCHES
    makespan = whole + 3 / 2
    assert found.bubble == pytest.approx(1 - (half + whole) / (2 * makespan))
    lying = {w.name: w for w in found.weights}
    assert lying["stack.s0.block0.attention.w_q"].cut == "heads/2"
    assert lying["stack.s1.block1.attention.w_q"].devices == ("CPU:2",)


def test_traffic_memory_bubble_and_flops():
    found, layer = reported("layers:2")
    assert isinstance(found, Report)
    assert sent(found, "layers") == BETWEEN and {s.axes for s in found.sent} == {"layers"}
    assert [m.device for m in found.memory] == ["CPU:0", "CPU:1"]
    weights = [bytes_of(layer.children[f"s{i}"]) for i in range(STAGES)]
    assert [m.weights for m in found.memory] == weights
    # The variables themselves stand for the optimizer's here.
    assert found.optimizer == {f"CPU:{i}": weights[i] for i in range(STAGES)}
    # 1F1B of equal stages, whose backward passes take twice the time (Narayanan et al., 2021).
    assert found.bubble == pytest.approx((STAGES - 1) / (MICROBATCHES + STAGES - 1))
    tokens = BATCH * LENGTH
    products = 2 * tokens * (4 * EMBED * EMBED + 2 * EMBED * HIDDEN)
    attention = 4 * BATCH * LENGTH * LENGTH * EMBED
    assert found.flops == 3 * STAGES * (products + attention)


def test_weights_count_in_both_dtypes():
    found, layer = reported("layers:2", fprop_dtype=tf.bfloat16)
    size = bytes_of(layer.children["s0"])
    memory = found.memory[0]
    assert (memory.weights, memory.variables) == (size // 2, size)
    row = str(found).splitlines()[1].split("  ")
    assert bytes_text(6 * size // 4) in [cell.strip() for cell in row]


def test_along_data_weights_go_out_and_gradients_come_back_once():
    found, layer = reported("layers:2;data:2 batch:data")
    along = sent(found, "data")
    assert along["weights"] == along["weight gradients"] == (1, bytes_of(layer))


def test_layers_say_what_they_take_and_hold_for_a_microbatch():
    found, layer = reported("layers:2")
    assert [[each.name for each in of_stage] for of_stage in found.layers] == [
        ["TransformerBlock"],
        ["TransformerBlock", "Head"],
    ]
    (block,), (_, head) = found.layers
    assert 3 * MICROBATCHES * STAGES * block.flops == found.flops and head.flops == 0
    assert block.output_bytes == BATCH // MICROBATCHES * LENGTH * EMBED * 4
    assert head.output_bytes == 8
    assert block.parameter_bytes == bytes_of(layer.children["s0"])
    # Who does not say is not said to hold nothing.
    assert head.parameter_bytes is None and head.activation_bytes is None
    # A stage keeps of a microbatch what its layer says.
    assert block.activation_bytes == pytest.approx(found.memory[0].stages[0].kept, rel=0.1)


def test_report_names_the_lengths_of_slices():
    found, _ = reported("layers:2", schedule="seq1f1b:2")
    assert str(found).endswith("\nslices of 3, 3 positions")
    # The second slice of the first stage attends to both: the sum is that of whole rows.
    whole, _ = reported("layers:2")
    busy = [sum(each.timeline.busy) for each in (found, whole)]
    assert busy[0] == pytest.approx(busy[1])
    first, second, *_ = (end - start for start, end in zip(*_times(found), strict=True))
    assert first < second


def _times(found):
    """The starts and ends of the first device's actions."""
    return found.timeline.starts[0], found.timeline.ends[0]
