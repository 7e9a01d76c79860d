"""Feed-forward layers and experts equal plain TensorFlow."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import LayoutError
from pipemesh.layers.named import Experts, FeedForward
from pipemesh.layers.named.lora import LowRank
from tests.layers.named.harness import SCALE, run, value_of

pytestmark = pytest.mark.gpu

INPUTS = value_of("x", [4, 3, 6])


def product(w, name="in"):
    return INPUTS @ w[f"w_{name}"] + w.get(f"b_{name}", 0.0)


def approximate_gelu(x):
    # Hendrycks and Gimpel, "GELUs", 2016, section 2.
    return 0.5 * x * (1 + tf.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


HIDDEN = {
    "RELU": lambda w: tf.maximum(product(w), 0.0),
    "GELU": lambda w: tf.nn.gelu(product(w)),
    "GELU_APPROXIMATE": lambda w: approximate_gelu(product(w)),
    "SWIGLU": lambda w: product(w) * product(w, "gate") * tf.sigmoid(product(w, "gate")),
}


# Other layouts equal one processor (tests/conformance).
@pytest.mark.parametrize(
    ("mesh", "activation", "use_bias", "hidden"),
    [
        ("model:1", "GELU", True, 8),
        ("model:1", "GELU_APPROXIMATE", False, 8),
        # These do not divide: the last slice is padded.
        ("model:2", "RELU", True, 7),
        ("model:3", "SWIGLU", True, 7),
    ],
)
def test_results_and_gradients_are_those_of_plain_tensorflow(mesh, activation, use_bias, hidden):
    params = FeedForward.Params().Set(name="ff", input_dim=6, hidden_dim=hidden)
    found = run(params.Set(activation=activation, use_bias=use_bias), [INPUTS], mesh)
    found.assert_plain(lambda w: HIDDEN[activation](w) @ w["w_out"] + w.get("b_out", 0.0))


def test_adapters_are_padded_like_their_weights():
    params = FeedForward.Params().Set(name="ff", input_dim=6, hidden_dim=7, use_bias=False)
    params.Set(adapted=("w_in", "w_out"), adapter_tpl=LowRank.Params().Set(rank=2, alpha=3.0))

    def whole(w, name):
        return w[name] + 1.5 * w[f"{name}_lora.a"] @ w[f"{name}_lora.b"]

    found = run(params, [INPUTS], "model:2")
    found.assert_plain(lambda w: tf.nn.relu(INPUTS @ whole(w, "w_in")) @ whole(w, "w_out"))


def test_hidden_values_that_are_dropped_must_divide():
    params = FeedForward.Params().Set(name="ff", input_dim=6, hidden_dim=7, dropout_rate=0.5)
    with pytest.raises(LayoutError, match=r"size 7, which axis .* cannot cut into 2"):
        run(params, [INPUTS], "model:2")


TOKENS = value_of("x", [2, 6, 5])
PADDINGS = np.zeros([2, 6], np.float32)
PADDINGS[0, 1] = PADDINGS[1, 4:] = 1
# Their hidden values are an odd number, so that the last slice of a split is padded.
EXPERTS = Experts.Params().Set(name="experts", input_dim=5, hidden_dim=3, num_experts=4)
RULES = "batch:data;experts:data;expert_ff:model"


def plain(w, choices, room, paddings=None):
    """Token by token."""
    skipped = np.zeros([2, 6], bool) if paddings is None else paddings > 0
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
                if "w_gate" in w:
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


def test_two_choices_travel_by_all_to_all():
    found = run(EXPERTS, [TOKENS], "data:2;model:2", RULES)
    found.assert_plain(lambda w: plain(w, 2, room=4))
    sent = found.lowering.costs.rows
    assert sent[("data",), "all_to_all", "forward"][0] == 2
    assert (("data",), "all_gather", "forward") not in sent


def test_room_for_all_tokens():
    # All tokens choose the first expert, which by default has room for two.
    def call(layer, theta, x):
        theta.w_router = tf.constant([[50.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 4)
        return layer.FProp(theta, x)[0]

    x = np.concatenate([np.ones([2, 6, 1], np.float32), TOKENS[..., 1:]], -1)
    params = EXPERTS.Copy().Set(num_choices=1)
    assert (run(params, [x], call=call, loss=None).outputs[0][:, 2:] == 0).all()
    params.capacity_factor = None
    found = run(params, [x], "data:2", RULES, call=call, loss=None)
    w_in, w_out = (SCALE * value_of(name, found.shapes[name])[0] for name in ("w_in", "w_out"))
    np.testing.assert_allclose(found.outputs[0], np.maximum(x @ w_in, 0) @ w_out, 1e-5, 1e-6)
    for capacity in (None, 9):
        assert Experts.Room(params.Set(capacity_factor=capacity), 6) == 6


def test_one_choice_with_little_room_and_padding():
    params = EXPERTS.Copy().Set(num_choices=1, capacity_factor=0.5, activation="SWIGLU")
    found = run(params, [TOKENS, PADDINGS], "data:2", RULES)
    found.assert_plain(lambda w: plain(w, 1, room=1, paddings=PADDINGS))
    # Some tokens found no room.
    passed = (np.abs(found.outputs[0]).sum(-1) == 0) & (PADDINGS == 0)
    assert passed.any() and not passed.all()
