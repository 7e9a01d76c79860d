"""Feed-forward layers and experts."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Experts, FeedForward, lowering_scope
from tests.layers.named.harness import make_lowering, reference, run, value_of

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


# Other layouts equal one processor (tests/conformance).
@pytest.mark.parametrize(
    ("mesh", "activation"),
    [
        ("model:4", "RELU"),
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
    assert found.lowering.costs.rows[("model",), "all_reduce", "forward"][0] == 1


def test_without_biases():
    wanted = reference(
        lambda w: tf.nn.relu(INPUTS @ w["w_in"]) @ w["w_out"], {"w_in": [6, 8], "w_out": [8, 6]}
    )
    run(FEED_FORWARD.Copy().Set(use_bias=False), [INPUTS], "model:2").assert_close(*wanted)


def test_hidden_values_are_dropped():
    found = run(FEED_FORWARD.Copy().Set(dropout_rate=0.5), [INPUTS], loss=None).outputs[0]
    assert abs(found - run(FEED_FORWARD, [INPUTS], loss=None).outputs[0]).max() > 0.1


def test_an_unknown_activation_is_an_error_with_the_nearest_name():
    with pytest.raises(PipelineError, match="activation is 'glu'; did you mean 'GELU'"):
        FEED_FORWARD.Copy().Set(activation="glu").Instantiate()


def test_hidden_values_that_do_not_divide_are_an_error_before_anything_runs():
    with (
        lowering_scope(make_lowering("model:4")),
        pytest.raises(LayoutError, match=r"'d_ff' .* size 10, which .* cannot cut into 4"),
    ):
        FEED_FORWARD.Copy().Set(hidden_dim=10).Instantiate()


TOKENS = value_of("x", [2, 6, 5])
PADDINGS = np.zeros([2, 6], np.float32)
PADDINGS[0, 1] = PADDINGS[1, 4:] = 1
EXPERTS = Experts.Params().Set(name="experts", input_dim=5, hidden_dim=2, num_experts=4)
SHAPES = {"w_router": [5, 4], "w_in": [4, 5, 2], "w_out": [4, 2, 5]}
RULES = "batch:data;experts:data;expert_ff:model"


def plain(choices, room, paddings=None, activation="RELU"):
    """Token by token."""
    skipped = np.zeros([2, 6], bool) if paddings is None else paddings > 0

    def experts(w):
        chances = tf.nn.softmax(TOKENS @ w["w_router"])
        order = np.argsort(-chances.numpy(), axis=-1, kind="stable")[..., :choices]
        rows, losses = [], []
        for b in range(2):
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


def test_two_choices_travel_by_all_to_all():
    found = run(EXPERTS, [TOKENS], "data:2;model:2", RULES)
    found.assert_close(*plain(2, room=4))
    sent = found.lowering.costs.rows
    assert sent[("data",), "all_to_all", "forward"][0] == 2
    assert (("data",), "all_gather", "forward") not in sent


@pytest.mark.parametrize("capacity", [None, 9])
def test_room_for_all_tokens(capacity):
    # All tokens choose the first expert, which by default has room for two.
    def call(layer, theta, x):
        theta.w_router = tf.constant([[50.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 4)
        return layer.FProp(theta, x)[0]

    x = np.concatenate([np.ones([2, 6, 1], np.float32), TOKENS[..., 1:]], -1)
    params = EXPERTS.Copy().Set(num_choices=1)
    assert (run(params, [x], call=call, loss=None).outputs[0][:, 2:] == 0).all()
    params.capacity_factor = capacity
    w_in, w_out = (0.3 * value_of(name, shape)[0] for name, shape in list(SHAPES.items())[1:])
    found = run(params, [x], "data:2", RULES, call=call, loss=None).outputs[0]
    np.testing.assert_allclose(found, np.maximum(x @ w_in, 0) @ w_out, 1e-5, 1e-6)
    assert Experts.Room(params, 6) == 6


def test_one_choice_with_little_room_and_padding():
    params = EXPERTS.Copy().Set(num_choices=1, capacity_factor=0.5, activation="SWIGLU")
    found = run(params, [TOKENS, PADDINGS], "data:2", RULES)
    found.assert_close(*plain(1, room=1, paddings=PADDINGS, activation="SWIGLU"))
    # Some tokens found no room.
    passed = (np.abs(found.outputs[0]).sum(-1) == 0) & (PADDINGS == 0)
    assert passed.any() and not passed.all()


def test_a_row_does_not_depend_on_the_others():
    whole, part = (run(EXPERTS, [x], loss=None).outputs for x in (TOKENS, TOKENS[1:]))
    for mine, all_rows in zip(part, whole, strict=True):
        np.testing.assert_allclose(mine, all_rows[1:], 1e-5, 1e-6)


def test_the_loss_is_one_where_all_are_chosen_alike():
    x = np.eye(4, 5, dtype=np.float32)[None] * 50

    def call(layer, theta, x):
        theta.w_router = tf.eye(5, 4)
        return layer.FProp(theta, x)[1]

    for tokens, wanted in ((x, 1.0), (x * 0 + x[:, :1], 4.0)):
        found = run(EXPERTS, [tokens], call=call, loss=None).outputs[0]
        assert found == pytest.approx([wanted])


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
