"""Feed-forward layers and experts."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Experts, FeedForward, lowering_scope
from tests.layers.named.harness import MESHES, make_lowering, reference, run, value_of

INPUTS = value_of("x", [4, 3, 6])
FEED_FORWARD = FeedForward.Params().Set(name="ff", input_dim=6, hidden_dim=8)
WEIGHTS = {"w_in": [6, 8], "b_in": [8], "w_out": [8, 6], "b_out": [6]}


def approximate_gelu(x):
    return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


PLAIN = {
    "RELU": lambda w: tf.maximum(INPUTS @ w["w_in"] + w["b_in"], 0.0),
    "GELU": lambda w: tf.nn.gelu(INPUTS @ w["w_in"] + w["b_in"]),
    # Hendrycks and Gimpel, "GELUs", 2016, section 2.
    "GELU_APPROXIMATE": lambda w: approximate_gelu(INPUTS @ w["w_in"] + w["b_in"]),
    "SWIGLU": lambda w: (
        (INPUTS @ w["w_in"] + w["b_in"])
        * (INPUTS @ w["w_gate"] + w["b_gate"])
        * tf.sigmoid(INPUTS @ w["w_gate"] + w["b_gate"])
    ),
}


@pytest.mark.parametrize(
    ("mesh", "activation"),
    [
        *((mesh, "RELU") for mesh in MESHES),
        ("model:2", "GELU"),
        ("model:2", "GELU_APPROXIMATE"),
        ("data:2;model:2", "SWIGLU"),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(mesh, activation):
    gate = {"w_gate": [6, 8], "b_gate": [8]} if activation == "SWIGLU" else {}
    wanted = reference(
        lambda w: PLAIN[activation](w) @ w["w_out"] + w["b_out"], {**WEIGHTS, **gate}
    )
    found = run(FEED_FORWARD.Copy().Set(activation=activation), [INPUTS], mesh)
    found.assert_close(*wanted)
    calls, _ = found.lowering.costs.rows.get((("model",), "all_reduce", "forward"), (0, 0))
    assert calls == (0 if mesh == "model:1" else 1)


def test_without_biases():
    wanted = reference(
        lambda w: tf.nn.relu(INPUTS @ w["w_in"]) @ w["w_out"], {"w_in": [6, 8], "w_out": [8, 6]}
    )
    run(FEED_FORWARD.Copy().Set(use_bias=False), [INPUTS], "model:2").assert_close(*wanted)


@pytest.mark.parametrize("mesh", ["model:4", "data:2;model:2"])
def test_what_is_dropped_does_not_depend_on_the_layout(mesh):
    params = FEED_FORWARD.Copy().Set(dropout_rate=0.5)
    whole = run(params, [INPUTS])
    run(params, [INPUTS], mesh).assert_close(whole.outputs, whole.grads)
    assert abs(whole.outputs[0] - run(FEED_FORWARD, [INPUTS]).outputs[0]).max() > 0.1


@pytest.mark.parametrize("mesh", ["model:4", "data:2;model:2"])
def test_initial_values_are_those_of_the_whole_layer(mesh):
    whole = run(FEED_FORWARD, [INPUTS], scale=None)
    run(FEED_FORWARD, [INPUTS], mesh, scale=None).assert_close(whole.outputs, whole.grads)


def test_an_unknown_activation_is_an_error_with_the_nearest_name():
    with pytest.raises(PipelineError, match="activation is 'glu'; did you mean 'GELU'"):
        FEED_FORWARD.Copy().Set(activation="glu").Instantiate()


def test_hidden_values_that_do_not_divide_are_an_error_before_anything_runs():
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(LayoutError, match=r"'d_ff' .* size 10, which .* cannot cut into 4"),
    ):
        FEED_FORWARD.Copy().Set(hidden_dim=10).Instantiate()


TOKENS = value_of("x", [4, 6, 5])
PADDINGS = np.zeros([4, 6], np.float32)
PADDINGS[0, 1] = PADDINGS[2, 4:] = 1
EXPERTS = Experts.Params().Set(name="experts", input_dim=5, hidden_dim=2, num_experts=4)
SHAPES = {"w_router": [5, 4], "w_in": [4, 5, 2], "w_out": [4, 2, 5]}
LAYOUTS = {
    "model:1": "",
    "model:2": "experts:model",
    "model:4": "experts:model",
    "data:2": "batch:data;experts:data",
    "data:2;model:2": "batch:data;experts:data;expert_ff:model",
    "b:2;e:2": "batch:b;experts:e",
}


def plain(choices, room, paddings=None, activation="RELU"):
    """Token by token."""
    skipped = np.zeros([4, 6], bool) if paddings is None else paddings > 0

    def experts(w):
        chances = tf.nn.softmax(TOKENS @ w["w_router"])
        order = np.argsort(-chances.numpy(), axis=-1, kind="stable")[..., :choices]
        rows, losses = [], []
        for b in range(4):
            taken, outputs = [0] * 4, [tf.zeros([5]) for _ in range(6)]
            for choice in range(choices):
                for t in range(6):
                    e = order[b, t, choice]
                    if skipped[b, t] or taken[e] == room:
                        continue
                    taken[e] += 1
                    hidden = tf.linalg.matvec(w["w_in"][e], TOKENS[b, t], transpose_a=True)
                    if activation == "SWIGLU":
                        gate = tf.linalg.matvec(w["w_gate"][e], TOKENS[b, t], transpose_a=True)
                        hidden = hidden * gate * tf.sigmoid(gate)
                    else:
                        hidden = tf.nn.relu(hidden)
                    total = sum(chances[b, t, other] for other in order[b, t])
                    part = chances[b, t, e] / (total if choices > 1 else 1.0)
                    answer = tf.linalg.matvec(w["w_out"][e], hidden, transpose_a=True)
                    outputs[t] += part * answer
            rows.append(tf.stack(outputs))
            real = np.flatnonzero(~skipped[b])
            firsts = np.bincount(order[b, real, 0], minlength=4) / len(real)
            mean = tf.reduce_mean(tf.gather(chances[b], real), 0)
            losses.append(4 * tf.reduce_sum(firsts.astype(np.float32) * mean))
        return tf.stack(rows), tf.stack(losses)

    gate = {"w_gate": [4, 5, 2]} if activation == "SWIGLU" else {}
    return reference(experts, SHAPES | gate)


@pytest.mark.parametrize("mesh", LAYOUTS)
def test_two_choices(mesh):
    run(EXPERTS, [TOKENS], mesh, LAYOUTS[mesh]).assert_close(*plain(2, room=4))


@pytest.mark.parametrize(("mesh", "capacity"), [("model:2", None), ("data:2", None), ("data:2", 9)])
def test_room_for_all_tokens(mesh, capacity):
    # All tokens choose the first expert, which by default has room for two.
    def call(layer, theta, x):
        theta.w_router = tf.constant([[50.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 4)
        return layer.FProp(theta, x)[0]

    x = np.concatenate([np.ones([4, 6, 1], np.float32), TOKENS[..., 1:]], -1)
    params = EXPERTS.Copy().Set(num_choices=1)
    assert (run(params, [x], call=call).outputs[0][:, 2:] == 0).all()
    params.capacity_factor = capacity
    w_in, w_out = (0.3 * value_of(name, shape)[0] for name, shape in list(SHAPES.items())[1:])
    found = run(params, [x], mesh, LAYOUTS[mesh], call=call).outputs[0]
    np.testing.assert_allclose(found, np.maximum(x @ w_in, 0) @ w_out, 1e-5, 1e-6)
    assert Experts.Room(params, 6) == 6


@pytest.mark.parametrize("mesh", ["model:1", "data:2"])
def test_one_choice_with_little_room_and_padding(mesh):
    params = EXPERTS.Copy().Set(num_choices=1, capacity_factor=1.0, activation="SWIGLU")
    found = run(params, [TOKENS, PADDINGS], mesh, LAYOUTS[mesh])
    found.assert_close(*plain(1, room=2, paddings=PADDINGS, activation="SWIGLU"))
    # Some tokens found no room.
    passed = (np.abs(found.outputs[0]).sum(-1) == 0) & (PADDINGS == 0)
    assert passed.any() and not passed.all()


def test_tokens_travel_by_all_to_all_if_the_batch_is_split_over_the_same_axis():
    costs = run(EXPERTS, [TOKENS], "data:2", LAYOUTS["data:2"]).lowering.costs
    assert costs.rows[("data",), "all_to_all", "forward"][0] == 2
    assert (("data",), "all_gather", "forward") not in costs.rows


def test_a_row_does_not_depend_on_the_others():
    whole = run(EXPERTS, [TOKENS]).outputs
    for rows in (slice(0, 1), slice(2, 4)):
        for part, all_rows in zip(run(EXPERTS, [TOKENS[rows]]).outputs, whole, strict=True):
            np.testing.assert_allclose(part, all_rows[rows], 1e-5, 1e-6)


def test_the_loss_is_one_where_all_are_chosen_alike():
    x = np.eye(4, 5, dtype=np.float32)[None] * 50

    def call(layer, theta, x):
        theta.w_router = tf.eye(5, 4)
        return layer.FProp(theta, x)[1]

    assert run(EXPERTS, [x], call=call).outputs[0] == pytest.approx([1.0])
    assert run(EXPERTS, [x * 0 + x[:, :1]], call=call).outputs[0] == pytest.approx([4.0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_choices": 3}, "num_choices is 3; a token meets 1 or 2 of the 4"),
        ({"num_experts": 1}, "num_choices is 2; a token meets 1 or 2 of the 1"),
        ({"capacity_factor": 0}, "capacity_factor is 0; it must be a number above 0, or None"),
        ({"activation": "RELLU"}, "did you mean 'RELU'"),
    ],
)
def test_params_that_do_not_fit_are_errors(changes, message):
    with pytest.raises(PipelineError, match=message):
        EXPERTS.Copy().Set(**changes).Instantiate()


def test_experts_that_do_not_divide_are_an_error():
    with (
        lowering_scope(make_lowering("model:4", "experts:model")),
        pytest.raises(LayoutError, match=r"'experts' of .* size 6, which .* cut into 4"),
    ):
        EXPERTS.Copy().Set(num_experts=6).Instantiate()


def test_meta_of_room_for_all_tokens():
    meta = Experts.FPropMeta(EXPERTS.Copy().Set(capacity_factor=None), tshape.Shape([4, 6, 5]))
    assert meta.flops == 2 * 4 * (6 * 5 * 4 + 4 * 6 * 2 * 5 * 2 + 6 * 2 * 5)


@pytest.mark.parametrize("dim", ["length", "router", "room"])
def test_dims_by_which_tokens_find_their_places_cannot_be_split(dim):
    # Split rows were routed slice by slice, each with the room of the whole row: wrong numbers.
    with (
        lowering_scope(make_lowering("model:2", f"{dim}:model")),
        pytest.raises(LayoutError, match=f"rule '{dim}:model' splits dim '{dim}', .* remove"),
    ):
        EXPERTS.Copy().Instantiate()


def test_meta_counts_the_router_and_all_slots():
    meta = Experts.FPropMeta(EXPERTS, tshape.Shape([4, 6, 5]))
    # Two choices of six tokens, 1.25 times, over four experts: 3.75. The last are means of answers.
    assert meta.flops == 2 * 4 * (6 * 5 * 4 + 4 * 4 * 2 * 5 * 2 + 6 * 2 * 5)
    assert meta.parameter_bytes == 4 * (5 * 4 + 2 * 4 * 5 * 2)
