"""AdamW and Muon on whole weights and on slices, beside references of the papers and torch."""

import importlib.util
import json
import math
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import learner, py_utils

from pipemesh.backend.saved_state import create_slots
from pipemesh.errors import PipelineError
from pipemesh.layers.named import (
    Attention,
    Convolution,
    Embedding,
    Experts,
    FeedForward,
    by_logical_name,
)
from pipemesh.layers.named.lora import LowRank
from pipemesh.layers.optimizers import AdamW, Muon
from pipemesh.layers.optimizers.checks import check_learner
from pipemesh.layers.optimizers.pieces import Matrix, mark_matrix, matrix_of
from tests.layers.harness import executing
from tests.layers.named.harness import make_lowering
from tests.layers.named.test_named_layer import make as make_layer
from tests.layers.test_optimizers import make, slices, train, values
from tests.pairwise import in_turn

RATE, STEPS = 0.1, 3
# Large, so that its place in the formula matters.
ADAMW = {"beta1": 0.8, "beta2": 0.9, "epsilon": 0.05, "weight_decay": 0.2}


def adamw_reference(value, grads, *, beta1, beta2, epsilon, weight_decay):
    """Loshchilov and Hutter, "Decoupled weight decay regularization", 2019, algorithm 2."""
    w, m, v = np.float64(value), 0.0, 0.0
    found = []
    for step, grad in enumerate(map(np.float64, grads), 1):
        m = beta1 * m + (1 - beta1) * grad
        v = beta2 * v + (1 - beta2) * grad**2
        corrected = m / (1 - beta1**step), np.sqrt(v / (1 - beta2**step))
        w = w - RATE * (corrected[0] / (corrected[1] + epsilon) + weight_decay * w)
        found.append(w)
    return found


def orthogonal_reference(x, steps=5):
    """Jordan, "Muon", 2024: iterations on a matrix with no more rows than columns."""
    if x.shape[0] > x.shape[1]:
        return orthogonal_reference(x.T, steps).T
    x = x / np.linalg.norm(x)
    for _ in range(steps):
        square = x @ x.T
        x = 3.4445 * x + (-4.7750 * square + 2.0315 * square @ square) @ x
    return x


def muon_reference(value, grads, matrices, *, scale, nesterov=True, momentum=0.95, decay=0.1):
    """Jordan, 2024, and Liu et al., 2025, equation 4, on matrices of inputs by outputs.

    `matrices` turns a weight into a list of views of its matrices.
    """
    w, kept = np.float64(value).copy(), np.zeros(value.shape)
    found = []
    for grad in map(np.float64, grads):
        kept = momentum * kept + grad
        moved = grad + momentum * kept if nesterov else kept
        update = np.zeros(w.shape)
        for view, matrix in zip(matrices(update), matrices(moved), strict=True):
            view[...] = orthogonal_reference(matrix)
            inputs, outputs = matrix.shape
            if scale == "original":
                view *= math.sqrt(max(1, outputs / inputs))
            else:
                view *= 0.2 * math.sqrt(max(inputs, outputs))
        w = w * (1 - RATE * decay) - RATE * update
        found.append(w)
    return found


def assert_all_close(found, wanted, rtol=2e-5, atol=2e-6):
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol, atol)


@pytest.mark.parametrize(
    ("sizes", "cuts", "name", "pattern", "eager"),
    [
        ((8, 6), (1, 1), "layer/w/var", None, True),
        ((8, 6), (2, 3), "layer/w/var", None, True),
        ((4, 6, 8), (2, 1, 2), "layer/w/var", None, False),
        ((12,), (3,), "layer/b_in/var", "", True),
        ((12,), (3,), "layer/b_in/var", None, False),
        ((8, 6), (2, 1), "stack/embedding/w/var", None, True),
        ((8, 6), (1, 1), "stack/w/var", r"(^|/)w$", True),
    ],
)
def test_adamw_is_that_of_the_paper(sizes, cuts, name, pattern, eager):
    value, grads = values(sizes)
    params = AdamW.Params().Set(**ADAMW)
    if pattern is not None:
        params.weight_decay_except = pattern
    decays = pattern == "" or (pattern is None and name == "layer/w/var")
    wanted = adamw_reference(
        value, grads, **{**ADAMW, "weight_decay": ADAMW["weight_decay"] * decays}
    )
    assert_all_close(train(params, value, grads, cuts, eager=eager, rate=RATE, name=name), wanted)


def test_weights_do_not_decay_in_a_step_that_fails():
    variable = tf.Variable(tf.ones([4, 4]), name="layer/w/var")
    optimizer = AdamW.Params().Set(name="adamw", **ADAMW).Instantiate().GetOptimizer(RATE)
    create_slots(optimizer, [variable])

    @tf.function
    def step(x):
        for _ in range(20):  # What the check waits for takes longer than the decay.
            x = x @ x
        gradient = tf.debugging.check_numerics(x[:4, :4], "gradient")
        optimizer.apply_gradients([(gradient, variable)])

    with pytest.raises(tf.errors.InvalidArgumentError, match="gradient"):
        step(tf.fill([200, 200], math.nan))
    np.testing.assert_array_equal(variable, np.ones([4, 4]))


def test_rows_of_a_sparse_gradient_are_added_and_all_rows_decay():
    value = values((4, 3))[0]
    dense = np.zeros((4, 3), np.float32)
    dense[1] = 2.0
    with executing(eager=True):
        variable = tf.Variable(value, name="layer/w/var")
        made = AdamW.Params().Set(**ADAMW).Instantiate().GetOptimizer(RATE)
        rows = tf.IndexedSlices(tf.ones([2, 3]), tf.constant([1, 1]), tf.constant([4, 3]))
        made.apply_gradients([(rows, variable)])
        assert_all_close([variable.numpy()], adamw_reference(value, [dense], **ADAMW))


def flat(value):
    return [value]


def heads_out(value):
    return [value.reshape(value.shape[0], -1)]


def heads_in(value):
    return [value.reshape(-1, value.shape[-1])]


# Sizes of a weight, in how many slices each dim is cut, its dims, and its matrices.
MATRICES = [
    ((8, 6), (1, 1), None, flat),
    ((6, 8), (2, 1), None, flat),
    ((6, 8), (3, 2), Matrix((0,), (1,)), flat),
    ((6, 4, 3), (1, 2, 1), Matrix((0,), (1, 2)), heads_out),
    ((4, 3, 8), (2, 1, 2), Matrix((0, 1), (2,)), heads_in),
    ((3, 4, 6), (3, 1, 1), Matrix((1,), (2,)), list),
    ((4, 6, 8), (2, 1, 2), Matrix((1,), (2,)), list),
]


@pytest.mark.parametrize(
    ("number", "scale"), in_turn(range(len(MATRICES)), ["original", "match_rms_adamw"])
)
def test_muon_is_that_of_the_papers(number, scale):
    sizes, cuts, mark, matrices = MATRICES[number]
    value, grads = values(sizes)
    nesterov = number % 3 != 2
    wanted = muon_reference(value, grads, matrices, scale=scale, nesterov=nesterov)
    params = Muon.Params().Set(update_scale=scale, nesterov=nesterov)
    eager = number % 3 == 0
    found = train(params, value, grads, cuts, eager=eager, rate=RATE, mark=mark)
    assert_all_close(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("sizes", "name", "options"),
    [
        ((12,), "layer/scale/var", {}),
        ((4, 3), "layer/query/b/var", {}),
        ((4, 3), "layer/softmax/bias_0/var", {}),
        ((4, 3), "layer/layer_norm/w/var", {}),
        ((6, 1), "layer/w/var", {}),
        ((4, 3, 2), "layer/w/var", {}),
        ((8, 6), "layer/softmax/w/var", {}),
        ((8, 6), "layer/w/var", {"adamw_for": "layer"}),
    ],
)
def test_muon_leaves_other_weights_to_adamw(sizes, name, options):
    value, grads = values(sizes)
    decay = ADAMW["weight_decay"] if name in ("layer/w/var", "layer/softmax/w/var") else 0.0
    wanted = adamw_reference(value, grads, **{**ADAMW, "weight_decay": decay})
    cuts = [2] + [1] * (len(sizes) - 1)
    params = Muon.Params().Set(**ADAMW, **options)
    found = train(params, value, grads, cuts, eager=True, rate=RATE, name=name, beside=True)
    assert_all_close(found, wanted)


def test_muon_needs_a_matrix():
    slots = Muon.Params().Instantiate().GetOptimizer(0.1)
    told = "none of the trained weights, such as 'layer/w', is one; use AdamW"
    with executing(eager=True), pytest.raises(PipelineError, match=told):
        create_slots(slots, slices())


def test_listed_matrices_are_matrices_whatever_their_names():
    """The second matrix of an adapter is called `b`, as are biases."""
    value, grads = values((8, 6))
    name, mark = "norm/w_lora/b/var", Matrix((0,), (1,))
    options = {"eager": True, "rate": RATE, "name": name, "mark": mark}
    found = train(AdamW.Params().Set(**ADAMW), value, grads, (2, 1), **options)
    assert_all_close(found, adamw_reference(value, grads, **ADAMW))
    params = Muon.Params().Set(update_scale="original")
    wanted = muon_reference(value, grads, flat, scale="original")
    assert_all_close(train(params, value, grads, (2, 1), **options), wanted, 2e-4, 2e-5)


def test_zero_gradients_only_decay_a_matrix():
    value = values((4, 6))[0]
    (found,) = train(Muon.Params(), value, [0 * value], (1, 1), eager=True)
    np.testing.assert_allclose(found, value * (1 - RATE * 0.1), rtol=1e-6)


HIDDEN = [
    (
        Attention.Params().Set(input_dim=8, num_heads=4, num_kv_heads=2, dim_per_head=3),
        {
            "w_q": (8, 4, 3),
            "w_k": (8, 2, 3),
            "w_v": (8, 2, 3),
            "w_out": (4, 3, 8),
        },
        {"w_out": Matrix((0, 1), (2,))},
    ),
    (
        FeedForward.Params().Set(input_dim=4, hidden_dim=8, activation="SWIGLU"),
        {"w_in": (4, 8), "w_gate": (4, 8), "w_out": (8, 4)},
        {},
    ),
    (
        Experts.Params().Set(input_dim=4, hidden_dim=8, num_experts=2),
        {"w_router": (4, 2), "w_in": (2, 4, 8), "w_out": (2, 8, 4)},
        {"w_in": Matrix((1,), (2,)), "w_out": Matrix((1,), (2,))},
    ),
    (
        Convolution.Params().Set(input_dim=3, output_dim=4, window=(3, 3)),
        {"w": (3, 3, 3, 4)},
        {"w": Matrix((0, 1, 2), (3,))},
    ),
    (Embedding.Params().Set(vocab_size=8, embedding_dim=4), {}, {}),
    (
        LowRank.Params().Set(rank=2, weight="heads:4;dim:3;embed:8", num_inputs=2),
        {"a": (4, 3, 2), "b": (2, 8)},
        {"a": Matrix((0, 1), (2,))},
    ),
]


@pytest.mark.parametrize("number", range(len(HIDDEN)))
def test_layers_name_their_hidden_matrices(number):
    params, sizes, special = HIDDEN[number]
    with executing(eager=True):
        layer = make_layer(params.Copy().Set(name="layer"), make_lowering("model:2"))
    found = {}
    for name, variable in layer.vars.FlattenItems():
        whole = name.partition("_slice_")[0]
        if (matrix := matrix_of(variable)) is not None:
            found[whole] = matrix
    inputs_first = {name: Matrix((0,), tuple(range(1, len(s)))) for name, s in sizes.items()}
    assert found == inputs_first | special


def test_state_is_in_slices_and_goes_to_any_other_cut(tmp_path):
    value, wholes = values((6, 8))[0], []
    for cuts in [(2, 2), (1, 1), (3, 1)]:
        with executing(eager=True) as step:
            weights = {}
            for name in ("layer/w/var", "layer/scale/var"):
                weights[name] = [variable for variable, _, _ in make(value, cuts, name)]
            for variable in weights["layer/w/var"]:
                mark_matrix(variable, Matrix((0,), (1,)))
            for variable in weights["layer/scale/var"]:
                mark_matrix(variable, None)
            flat_weights = [variable for each in weights.values() for variable in each]
            with py_utils.GlobalStepContext(step):
                slots = Muon.Params().Instantiate().GetOptimizer(0.1)
            create_slots(slots, flat_weights)
        numbers = sum(variable.shape.num_elements() for variable in slots.variables())
        assert numbers == value.size * 3 + 2, "one for a matrix, two for others, two powers"
        for state in slots.variables():
            parts = [v for v in flat_weights if state.name.startswith(v.name.removesuffix(":0"))]
            assert state.name.endswith("_power:0") or parts[0].device == state.device
        layer = py_utils.NestedMap(vars=py_utils.NestedMap(w=flat_weights))
        names = by_logical_name(layer, slots.variables())
        assert sorted(names) == [
            "beta1_power",
            "beta2_power",
            "layer/scale/var/Muon",
            "layer/scale/var/Muon_1",
            "layer/w/var/Muon",
        ]
        saved = tf.train.Checkpoint(**{n.replace("/", "."): v for n, v in names.items()})
        if not wholes:
            for variable in slots.variables():
                variable.assign(tf.random.normal(variable.shape))
            path = saved.write(str(tmp_path / "ckpt"))
        saved.read(path).assert_consumed()
        found = {}
        for v in slots.variables():
            found[v.name] = float(tf.reduce_sum(v))
        wholes.append(sum(total for name, total in found.items()))
    np.testing.assert_allclose(wholes, wholes[0], rtol=1e-4)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (AdamW.Params().Set(weight_decay_except="["), r"weight_decay_except='\[' is no regular"),
        (Muon.Params().Set(adamw_for="("), r"adamw_for='\(' is no regular expression"),
        (Muon.Params().Set(update_scale="orginal"), "did you mean 'original'"),
    ],
)
def test_invalid_params_are_errors(params, told):
    with pytest.raises(PipelineError, match=told):
        params.Instantiate()


def test_a_pattern_must_be_found_in_some_weight():
    slots = AdamW.Params().Set(weight_decay_except="nrom").Instantiate().GetOptimizer(0.1)
    told = "weight_decay_except='nrom' is found in none of the 1 trained weights, such as 'layer/w'"
    with executing(eager=True), pytest.raises(PipelineError, match=told):
        create_slots(slots, slices())


@pytest.mark.parametrize("params", [AdamW.Params(), Muon.Params()])
def test_learners_take_them_for_slices(params):
    check_learner(learner.Learner.Params().Set(name="loss", optimizer=params), slices())


TORCH = """
import json, sys, torch
cases = json.load(sys.stdin)
found = []
for case in cases:
    weight = torch.nn.Parameter(torch.tensor(case["value"]))
    made = getattr(torch.optim, case["optimizer"])([weight], **case["options"])
    found.append([])
    for grad in case["grads"]:
        weight.grad = torch.tensor(grad)
        made.step()
        found[-1].append(weight.tolist())
json.dump(found, sys.stdout)
"""
MUON = {"lr": RATE, "weight_decay": 0.1}
# torch's optimizer and options, and ours.
OF_TORCH = [
    ("AdamW", {"lr": RATE}, AdamW.Params()),
    (
        "AdamW",
        {"lr": RATE, "betas": (0.8, 0.9), "eps": 0.05, "weight_decay": 0.2},
        AdamW.Params().Set(**ADAMW),
    ),
    ("Muon", {**MUON, "adjust_lr_fn": "original"}, Muon.Params().Set(update_scale="original")),
    ("Muon", {**MUON, "adjust_lr_fn": "match_rms_adamw"}, Muon.Params()),
]


def test_they_are_torchs():
    """torch's Muon has outputs first, and iterates in bfloat16.

    In a process of its own, as torch's optimizers import what crashes beside TensorFlow.
    """
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torch to compare with is not installed: pip install -e '.[dev,peers]'")
    value, grads = values((8, 6))
    cases = [
        {
            "optimizer": name,
            "options": options,
            "value": (value.T if name == "Muon" else value).tolist(),
            "grads": [(grad.T if name == "Muon" else grad).tolist() for grad in grads],
        }
        for name, options, _ in OF_TORCH
    ]
    done = subprocess.run(
        [sys.executable, "-c", TORCH],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    for (name, _, params), wanted in zip(OF_TORCH, json.loads(done.stdout), strict=True):
        found = train(params, value, grads, (2, 1), eager=True, rate=RATE)
        if name == "Muon":
            assert_all_close(found, [np.transpose(w) for w in wanted], rtol=0, atol=0.03 * RATE)
        else:
            assert_all_close(found, wanted, rtol=2e-6, atol=1e-6)
