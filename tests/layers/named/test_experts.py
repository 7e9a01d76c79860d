"""Experts equal a loop over tokens under every layout."""

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import tshape

from pipemesh.errors import LayoutError, PipelineError
from pipemesh.layers.named import Experts, lowering_scope
from tests.layers.named.harness import make_lowering, reference, run, value_of

X = value_of("x", [4, 6, 5])
PADDINGS = np.zeros([4, 6], np.float32)
PADDINGS[0, 1] = PADDINGS[2, 4:] = 1
PARAMS = Experts.Params().Set(name="experts", input_dim=5, hidden_dim=2, num_experts=4)
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
        chances = tf.nn.softmax(X @ w["w_router"])
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
                    hidden = tf.linalg.matvec(w["w_in"][e], X[b, t], transpose_a=True)
                    if activation == "SWIGLU":
                        gate = tf.linalg.matvec(w["w_gate"][e], X[b, t], transpose_a=True)
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
    run(PARAMS, [X], mesh, LAYOUTS[mesh]).assert_close(*plain(2, room=4))


@pytest.mark.parametrize(("mesh", "capacity"), [("model:2", None), ("data:2", None), ("data:2", 9)])
def test_room_for_all_tokens(mesh, capacity):
    # All tokens choose the first expert, which by default has room for two.
    def call(layer, theta, x):
        theta.w_router = tf.constant([[50.0, 0.0, 0.0, 0.0]] + [[0.0] * 4] * 4)
        return layer.FProp(theta, x)[0]

    x = np.concatenate([np.ones([4, 6, 1], np.float32), X[..., 1:]], -1)
    params = PARAMS.Copy().Set(num_choices=1)
    assert (run(params, [x], call=call).outputs[0][:, 2:] == 0).all()
    params.capacity_factor = capacity
    w_in, w_out = (0.3 * value_of(name, shape)[0] for name, shape in list(SHAPES.items())[1:])
    found = run(params, [x], mesh, LAYOUTS[mesh], call=call).outputs[0]
    np.testing.assert_allclose(found, np.maximum(x @ w_in, 0) @ w_out, 1e-5, 1e-6)
    assert Experts.Room(params, 6) == 6


@pytest.mark.parametrize("mesh", ["model:1", "data:2"])
def test_one_choice_with_little_room_and_padding(mesh):
    params = PARAMS.Copy().Set(num_choices=1, capacity_factor=1.0, activation="SWIGLU")
    found = run(params, [X, PADDINGS], mesh, LAYOUTS[mesh])
    found.assert_close(*plain(1, room=2, paddings=PADDINGS, activation="SWIGLU"))
    # Some tokens found no room.
    passed = (np.abs(found.outputs[0]).sum(-1) == 0) & (PADDINGS == 0)
    assert passed.any() and not passed.all()


def test_tokens_travel_by_all_to_all_if_the_batch_is_split_over_the_same_axis():
    costs = run(PARAMS, [X], "data:2", LAYOUTS["data:2"]).lowering.costs
    assert costs.rows[("data",), "all_to_all", "forward"][0] == 2
    assert (("data",), "all_gather", "forward") not in costs.rows


def test_a_row_does_not_depend_on_the_others():
    whole = run(PARAMS, [X]).outputs
    for rows in (slice(0, 1), slice(2, 4)):
        for part, all_rows in zip(run(PARAMS, [X[rows]]).outputs, whole, strict=True):
            np.testing.assert_allclose(part, all_rows[rows], 1e-5, 1e-6)


def test_the_loss_is_one_where_all_are_chosen_alike():
    x = np.eye(4, 5, dtype=np.float32)[None] * 50

    def call(layer, theta, x):
        theta.w_router = tf.eye(5, 4)
        return layer.FProp(theta, x)[1]

    assert run(PARAMS, [x], call=call).outputs[0] == pytest.approx([1.0])
    assert run(PARAMS, [x * 0 + x[:, :1]], call=call).outputs[0] == pytest.approx([4.0])


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
        PARAMS.Copy().Set(**changes).Instantiate()


def test_experts_that_do_not_divide_are_an_error():
    with (
        lowering_scope(make_lowering("model:4", "experts:model")),
        pytest.raises(LayoutError, match=r"'experts' of .* size 6, which .* cut into 4"),
    ):
        PARAMS.Copy().Set(num_experts=6).Instantiate()


def test_meta_of_room_for_all_tokens():
    meta = Experts.FPropMeta(PARAMS.Copy().Set(capacity_factor=None), tshape.Shape([4, 6, 5]))
    assert meta.flops == 2 * 4 * (6 * 5 * 4 + 4 * 6 * 2 * 5 * 2 + 6 * 2 * 5)


@pytest.mark.parametrize("dim", ["length", "router", "room"])
def test_dims_by_which_tokens_find_their_places_cannot_be_split(dim):
    # Split rows were routed slice by slice, each with the room of the whole row: wrong numbers.
    with (
        lowering_scope(make_lowering("model:2", f"{dim}:model")),
        pytest.raises(LayoutError, match=f"rule '{dim}:model' splits dim '{dim}', .* remove"),
    ):
        PARAMS.Copy().Instantiate()


def test_meta_counts_the_router_and_all_slots():
    meta = Experts.FPropMeta(PARAMS, tshape.Shape([4, 6, 5]))
    # Two choices of six tokens, 1.25 times, over four experts: 3.75. The last are means of answers.
    assert meta.flops == 2 * 4 * (6 * 5 * 4 + 4 * 4 * 2 * 5 * 2 + 6 * 2 * 5)
    assert meta.parameter_bytes == 4 * (5 * 4 + 2 * 4 * 5 * 2)
