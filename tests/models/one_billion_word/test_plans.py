"""Nothing but speed depends on the plan: each gives the losses of the plain model."""

import functools

import numpy as np
import pytest
from lingvo.core import tshape

from models.one_billion_word.params import layers_of
from pipemesh.layers.layout_pricing import layers_shares
from pipemesh.mesh import LayoutRules
from pipemesh.plan import Machine, Plan
from tests.models.one_billion_word.language_model import (
    BATCH_SIZE,
    TIME,
    losses,
    random_batch,
    small,
)

BATCHES = [random_batch(seed) for seed in range(4)]
# A step size at which round-off stays round-off; a norm that clips in most steps.
CALM = {
    "LAYERS": "named",
    "NUM_HEADS": 4,
    "DROPOUT_PROB": 0.1,
    "LEARNING_RATE": 0.02,
    "CLIP_GRADIENT_NORM": 0.3,
}
MODELS = {
    "dense": {},
    "tied": {"TIED_EMBEDDINGS": True},
    "experts": {"NUM_EXPERTS": 4, "HIDDEN_DIM": 16},
}
SPLIT = "batch:data;heads:model;vocab:model"
DENSE, EXPERTS = f"{SPLIT};d_ff:model", f"{SPLIT};experts:model"
# Differences beside those of the plan are noted.
CASES = [
    ("experts", Plan("b:2;layers:2", "heads:b;vocab:b;experts:b", "zb_v", 2)),
    # Weights are cut over replicas; two stages share a table, and the norm is that of all slices.
    ("tied", Plan("layers:2;data:2", "batch:data;embed:data", "1f1b", 2)),
]
RULES_OF_ONE_PROGRAM = "vocab:layers;heads:model;d_ff:model"
MORE_CASES = [
    ("experts", Plan("b:2;layers:2;a:2", "batch:a;heads:b;vocab:b;experts:b", "zb_v", 2)),
    # And tokens are split between products.
    ("tied", Plan("layers:2;data:2;model:2", f"{DENSE};length:model;embed:data", "1f1b", 2)),
    # No device has a whole sequence.
    ("dense", Plan("layers:2;data:2;cp:2", "batch:data;length:cp", "zb_h1", 2)),
    (
        "tied",
        Plan(
            "layers:2;cp:2;model:2",
            f"length:cp;{RULES_OF_ONE_PROGRAM}",
            "looped_bfs:2",
            4,
            lowering="simd",
        ),
    ),
    ("dense", Plan("layers:2;data:2;model:2", DENSE, "interleaved:2", 4)),
    # The embedding and the blocks of each replica lie on two devices, the softmax on one.
    ("dense", Plan("layers:2;data:2;model:2,1", DENSE, "zb_h1", 2, (0, 3, 4))),
    ("experts", Plan("layers:2;data:2;model:2", EXPERTS, "gpipe", 2, lowering="simd")),
    # The stages of one program share the vocabulary.
    ("tied", Plan("layers:2;model:2", RULES_OF_ONE_PROGRAM, "looped_bfs:2", 4, lowering="simd")),
]


@functools.cache
def losses_of(model, blocks, plan=None):
    """The losses under a plan, or of the plain model."""
    settings = {**CALM, **MODELS[model], "NUM_LAYERS": blocks}
    is_plain = plan is None
    return losses(small(**settings, PLAN=plan or Plan(), PIPELINED=not is_plain), BATCHES)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES)],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_losses_are_those_of_the_plain_model(model, plan):
    # Four where two cannot be dealt out evenly to four stages.
    blocks = 4 if plan.lowering == "simd" else 2
    np.testing.assert_allclose(losses_of(model, blocks, plan), losses_of(model, blocks), rtol=1e-5)


@pytest.mark.slow
def test_offered_layouts_give_the_losses_of_the_plain_model(pytestconfig):
    """Whatever rules `pipemesh plan` may choose for the model, its stack runs under them; two of
    them, unless all cases run.
    """
    settings = {**CALM, "NUM_LAYERS": 1}
    shape = tshape.Shape([BATCH_SIZE, TIME])
    offered = layers_shares(layers_of(small(**settings)), Machine(1e10), BATCH_SIZE, *[shape] * 5)
    assert {"heads:model;d_ff:model;vocab:model", "embed:data"} <= set(offered)
    plain = losses(small(**settings, PIPELINED=False, PLAN=Plan()), BATCHES[:2])
    # Rules that the search has found, and the last ones, which cut weights too.
    few = list(offered)[1 :: len(offered) - 2]
    for layout in offered if pytestconfig.getoption("cases") == "all" else few:
        axes = sorted({axis for _, axis in LayoutRules.from_text(layout).rules})
        mesh = ";".join(["layers:1", *(f"{axis}:2" for axis in axes)])
        rules = ";".join(["batch:data"] * ("data" in axes) + [layout])
        plan = Plan(mesh, rules, remat="none")
        found = losses(small(**settings, PLAN=plan), BATCHES[:2])
        np.testing.assert_allclose(found, plain, rtol=1e-5, err_msg=layout)
