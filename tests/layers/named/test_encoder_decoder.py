"""An encoder-decoder equals its layers in sequence under every plan."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.layers import PartitionSequentialLayers, layer_costs
from pipemesh.layers.named import (
    Attention,
    Embedding,
    Experts,
    FeedForward,
    NamedLayer,
    Norm,
    SoftmaxCrossEntropy,
    TransformerBlock,
    encoder_decoder_layers,
)
from pipemesh.schedule import build, simulate
from tests.layers.harness import executing, run_tf1, run_tf2
from tests.layers.named.harness import run
from tests.layers.stacks import equal_to_plain, first, stack_of

BATCH, SOURCE, TARGET, VOCAB = 4, 6, 5, 11
RNG = np.random.default_rng(0)
IDS, LABELS = (RNG.integers(0, VOCAB, [BATCH, TARGET]).astype(np.int32) for _ in range(2))
# Packed sentences, 0 for padding.
SEGMENTS = [np.array([row, [1] * len(row)] * 2, np.int32) for row in ([1, 1, 2, 2, 2, 0], [1] * 5)]
SEGMENTS[1][0] = [1, 2, 2, 2, 0]
INPUTS = [
    RNG.integers(0, VOCAB, [BATCH, SOURCE]).astype(np.int32),
    SEGMENTS[0],
    np.array([[0, 1, 0, 1, 2, 0], range(SOURCE)] * 2, np.int32),
    IDS,
    LABELS,
    RNG.uniform(size=[BATCH, TARGET]).astype(np.float32),
    SEGMENTS[1],
    np.array([[0, 0, 1, 2, 0], range(TARGET)] * 2, np.int32),
]


class Block(TransformerBlock):
    """A block with methods that no decoder would have."""


def layers(tied=True, encoder=2, decoder=2, plain=False, block=TransformerBlock, **changes):
    """Packed, with dropout; or `plain`, as T5."""
    block = block.Params().Set(input_dim=8, num_heads=2, hidden_dim=8, dropout_rate=0.2)
    block.attention_tpl.Set(relative_buckets=4, relative_max_distance=5)
    block.Set(**changes)
    embedding = Embedding.Params().Set(vocab_size=VOCAB)
    if not plain:
        embedding.Set(positions="sinusoidal", dropout_rate=0.2)
    softmax = SoftmaxCrossEntropy.Params().Set(vocab_size=VOCAB, use_bias=not plain)
    return encoder_decoder_layers(embedding, block, softmax, encoder, decoder, tied)


def stack(bounds, **options):
    """With names for which weights have their own initial values in every layout."""
    made, tied = layers(encoder=1)
    for i, layer in enumerate(made):
        layer.name = f"named_{i:03d}"
    tied = {to.replace("cell", "named"): of.replace("cell", "named") for to, of in tied.items()}
    options = {"num_micro_batches": 2, "loss_inside": True, **options}
    return stack_of(made, bounds, tied=tied, **options)


RULES = "model:2 heads:model;d_ff:model;vocab:model"
SPLIT = f"layers:3;{RULES}"


@pytest.mark.parametrize(
    ("run", "mesh", "bounds", "options"),
    [
        pytest.param(
            run_tf2, "layers:3", [0, 2, 4, 6], {"schedule": "1f1b"}, marks=pytest.mark.exhaustive
        ),
        pytest.param(
            run_tf1,
            "layers:3",
            [0, 3, 4, 6],
            {"schedule": "zb_h1", "remat": "none"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            run_tf2,
            "layers:2",
            [0, 1, 3, 4, 6],
            {"schedule": "interleaved", "remat": "none"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            run_tf1,
            SPLIT,
            [0, 2, 4, 6],
            {"schedule": "zb_h1", "remat": "none"},
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            run_tf2,
            SPLIT,
            [0, 1, 2, 3, 4, 5, 6],
            {"schedule": "interleaved", "num_micro_batches": 3},
            marks=pytest.mark.exhaustive,
        ),
        (run_tf2, f"layers:2;{RULES}", [0, 1, 3, 4, 6], {"schedule": "interleaved"}),
        (run_tf2, "data:2;layers:2", [0, 3, 6], {"schedule": "zb_h1"}),
    ],
)
@pytest.mark.slow
def test_everything_equals_the_plain_model_with_dropout_on(run, mesh, bounds, options):
    # Interleaved stages need as many microbatches as homes.
    rows = [0, 1, 2, 3, 1, 0] if options.get("num_micro_batches") == 3 else range(BATCH)
    inputs = [x[list(rows)] for x in INPUTS]
    found = equal_to_plain(run, stack(bounds, **options), inputs, mesh, loss=first)
    # One table for both embeddings and the softmax.
    assert sum("table" in name for name in found.grads) == 1 + ("vocab" in mesh)


def test_stages_of_an_encoder_decoder_are_no_one_loop():
    with pytest.raises(PipelineError, match="simd"):
        run_tf2(stack([0, 2, 4, 6], lowering="simd"), INPUTS, num_devices="layers:3", loss=first)


def specs(source, target):
    return [
        tf.TensorSpec([BATCH, length], dtype)
        for length, dtype in [(source, tf.int32)] * 3
        + [(target, tf.int32)] * 2
        + [(target, tf.float32)]
        + [(target, tf.int32)] * 2
    ]


@pytest.mark.parametrize(
    ("source", "target", "bounds"), [(64, 4, (0, 2, 4, 11)), (4, 64, (0, 7, 9, 11))]
)
def test_stages_are_cut_by_flops_over_both(source, target, bounds):
    made, _ = layers(encoder=4, decoder=4)
    stages = PartitionSequentialLayers(made, 3, *specs(source, target))
    assert tuple(np.cumsum([0, *(len(stage.sub) for stage in stages)])) == bounds


def test_layers_of_a_stage_keep_one_memory():
    params = stack([0, 3, 5, 6], remat="none", schedule="1f1b", check_numerics="off")
    with executing(eager=False, devices="layers:3"):
        inputs = [tf.TensorSpec(x.shape, x.dtype) for x in INPUTS]
        devices = params.Instantiate().PredictMemory(*inputs)
    # Two blocks, each of which would keep a memory, and the segments of both, of its own.
    blocks = layer_costs(layers(encoder=1)[0], *inputs)[3:5]
    shared = 4 * BATCH * (SOURCE * 8 + SOURCE + TARGET)
    # Both microbatches are on their way.
    assert devices[1].kept == sum(block.activation_bytes for block in blocks) - shared


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        ("zb_h1", [0, 2, 4, 6]),
        pytest.param("1f1b", [0, 2, 4, 6], marks=pytest.mark.exhaustive),
        pytest.param("interleaved", [0, 1, 2, 3, 4, 5, 6], marks=pytest.mark.exhaustive),
    ],
)
def test_memory_is_that_of_the_simulated_schedule(name, bounds):
    """A device keeps what its row of the schedule has begun and not finished."""
    number = 3
    inputs = [tf.TensorSpec([3 * number, *x.shape[1:]], x.dtype) for x in INPUTS]
    options = {"remat": "none", "check_numerics": "off", "num_micro_batches": number}
    with executing(eager=False, devices=SPLIT):
        devices = stack(bounds, schedule=name, **options).Instantiate().PredictMemory(*inputs)
    timeline = simulate(build(name, 3, number))
    assert timeline.schedule.num_stages == len(bounds) - 1 and len(devices) == 6
    for place, device in enumerate(devices):
        row, held = timeline.schedule.rows[place // 2], [0]
        stages = dict(zip(sorted({action.stage for action in row}), device.stages, strict=True))
        for action in row:
            kept, pending = stages[action.stage].kept, stages[action.stage].pending
            change = {"F": kept, "B": -kept, "I": pending - kept, "W": -pending}
            held.append(held[-1] + change[action.kind])
        assert held[-1] == 0 and device.kept == max(held), device.device
        if name == "1f1b":
            assert device.kept == timeline.in_flight[place // 2] * stages[place // 2].kept


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": 0}, "num_encoder_layers is 0"),
        ({"feed_forward_tpl": Experts.Params()}, "Experts, whose balance loss does not travel"),
        (
            {"block": Block},
            "params of Block, .* EncoderBlock .*; give params of Transf",
        ),
    ],
)
def test_what_cannot_be_made_is_an_error(changes, message):
    with pytest.raises(PipelineError, match=message):
        layers(**changes)


def test_a_decoder_never_sees_later_tokens():
    made, _ = layers(attention_tpl=Attention.Params().Set(causal=False))
    assert [made[i].attention_tpl.causal for i in (1, 2, 4, 5)] == [False, False, True, True]


class Layers(NamedLayer):
    """Layers one after the other."""

    @classmethod
    def Params(cls):
        p = super().Params()
        p.Define("layers", [], "Params of the layers.")
        return p.Set(name="model")

    def __init__(self, params):
        super().__init__(params)
        self.CreateChildren("layers", self.params.layers)

    def FProp(self, theta, *values):
        for layer, own in zip(self.layers, theta.layers, strict=True):
            values = layer.FProp(own, *values)
        return values


BUCKETS, FAR, WIDTH, HEADS, HEAD_DIM, HIDDEN, EPSILON = 8, 5, 8, 2, 3, 12, 0.02


def names_of_t5():
    """For each of our weights that of T5 1.1, and how it changes.

    There the first layer's biases serve all layers, and one table both sides and the softmax.
    """

    def swapped(w):
        return w.T

    def attention(name):
        return {
            f"w_{part}": (f"{name}.{part}.weight", lambda w: w.T.reshape(WIDTH, HEADS, HEAD_DIM))
            for part in "qkv"
        } | {"w_out": (f"{name}.o.weight", lambda w: w.T.reshape(HEADS, HEAD_DIM, WIDTH))}

    def scale(name):
        return f"{name}.weight", lambda w: w - 1

    found = {
        "layers[0].table": ("shared.weight", np.array),
        "layers[3].table": ("shared.weight", np.array),
        "layers[3].memory_norm.scale": scale("encoder.final_layer_norm"),
        "layers[6].norm.scale": scale("decoder.final_layer_norm"),
        "layers[6].w": ("shared.weight", swapped),
    }
    for side, begin, kinds in (
        ("encoder", 1, {"attention": "SelfAttention"}),
        ("decoder", 4, {"attention": "SelfAttention", "cross_attention": "EncDecAttention"}),
    ):
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for i in range(2):
            ours, theirs = f"layers[{begin + i}]", f"{side}.block.{i}.layer"
            for number, (mine, kind) in enumerate(kinds.items()):
                weights = attention(f"{theirs}.{number}.{kind}")
                found |= {f"{ours}.{mine}.{part}": value for part, value in weights.items()}
                found[f"{ours}.{mine}_norm.scale"] = scale(f"{theirs}.{number}.layer_norm")
            found[f"{ours}.attention.relative_bias"] = (bias, np.array)
            last = f"{theirs}.{len(kinds)}"
            found[f"{ours}.feed_forward_norm.scale"] = scale(f"{last}.layer_norm")
            for mine, part in (("w_gate", "wi_0"), ("w_in", "wi_1"), ("w_out", "wo")):
                name = f"{last}.DenseReluDense.{part}.weight"
                found[f"{ours}.feed_forward.{mine}"] = (name, swapped)
    return found


@pytest.fixture(scope="module")
def t5():
    """T5 1.1 of `transformers`: its loss, its weights, and their gradients."""
    reason = "the models to compare with are not installed: pip install -e '.[dev,peers]'"
    torch = pytest.importorskip("torch", reason=reason)
    package = pytest.importorskip("transformers", reason=reason)
    torch.manual_seed(7)
    config = package.T5Config(
        vocab_size=VOCAB,
        d_model=WIDTH,
        d_kv=HEAD_DIM,
        d_ff=HIDDEN,
        num_layers=2,
        num_heads=HEADS,
        relative_attention_num_buckets=BUCKETS,
        relative_attention_max_distance=FAR,
        layer_norm_epsilon=EPSILON,
        feed_forward_proj="gated-gelu",
        tie_word_embeddings=False,
    )
    model = package.T5ForConditionalGeneration(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.3 * torch.randn(weight.shape))
    labels = np.where(INPUTS[5] > 0.3, LABELS, -100)
    source, mask, ids, labels = (
        torch.tensor(x.astype(np.int64)) for x in (INPUTS[0], INPUTS[1] > 0, IDS, labels)
    )
    loss = model(input_ids=source, attention_mask=mask, decoder_input_ids=ids, labels=labels).loss
    loss.backward()
    weights = dict(model.named_parameters())
    return (
        loss.item(),
        {name: weight.detach().numpy() for name, weight in weights.items()},
        {name: weight.grad.numpy() for name, weight in weights.items()},
    )


@pytest.mark.slow
# torch warns where a driver without a GPU is.
@pytest.mark.filterwarnings("ignore:CUDA initialization")
def test_loss_and_gradients_are_those_of_t5(t5):
    loss, weights, grads = t5
    made, _ = layers(
        tied=False,
        dropout_rate=0.0,
        hidden_dim=HIDDEN,
        norm_tpl=Norm.Params().Set(kind="rms", epsilon=EPSILON),
        feed_forward_tpl=FeedForward.Params().Set(activation="GEGLU_APPROXIMATE", use_bias=False),
        attention_tpl=Attention.Params().Set(
            dim_per_head=HEAD_DIM,
            use_bias=False,
            score_scale=1.0,
            relative_buckets=BUCKETS,
            relative_max_distance=FAR,
            # Several blocks, of which the last extends beyond the sequence.
            block_size=4,
        ),
        plain=True,
    )
    names = names_of_t5()
    mask = (INPUTS[1] > 0).astype(np.int32)
    inputs = [INPUTS[0], mask, None, IDS, LABELS, (INPUTS[5] > 0.3).astype(np.float32)]
    inputs += [np.ones_like(IDS), None]
    found = run(
        Layers.Params().Set(layers=made),
        inputs,
        "model:2",
        values={path: change(weights[name]) for path, (name, change) in names.items()},
        loss=lambda outputs: outputs[0] / outputs[1],
    )
    np.testing.assert_allclose(found.outputs[0] / found.outputs[1], loss, rtol=1e-5)
    assert {name for name, _ in names.values()} == set(weights)
    for name, grad in grads.items():
        mine = {path: how for path, (of, how) in names.items() if of == name}
        if len(mine) > 1:
            # These change nothing, or swap dims, there and back.
            total, wanted = sum(how(found.grads[path]) for path, how in mine.items()), grad
        else:
            # A scale is one less, its gradient is not.
            (path, how), *_ = mine.items()
            total, wanted = found.grads[path], how(grad) + ("norm" in name)
        np.testing.assert_allclose(total, wanted, rtol=0, atol=2e-5, err_msg=name)
