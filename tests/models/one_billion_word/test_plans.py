"""Nothing but speed depends on the plan: each gives the losses of the plain model.

`python -m tests.layers.random_plans` draws plans of a smaller stack.
"""

import numpy as np
import pytest

from pipemesh.plan import Plan
from tests.models.one_billion_word.language_model import losses, random_batch, small

STEPS = 20
BATCHES = [random_batch(seed) for seed in range(STEPS)]
# A step size at which round-off stays round-off; a norm that clips in most steps.
CALM = {
    "LAYERS": "named",
    "NUM_LAYERS": 2,
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
SPLIT = {
    "dense": ("heads", "d_ff", "vocab"),
    "tied": ("heads", "d_ff", "vocab"),
    "experts": ("heads", "experts", "vocab"),
}


def blocks_of(plan):
    """How many blocks the model has; four where two cannot be dealt out evenly to four stages."""
    return 4 if plan.lowering == "simd" else CALM["NUM_LAYERS"]


@pytest.fixture(scope="module")
def expected():
    """The losses of the plain model, computed once for each."""
    cache = {}

    def get(model, blocks):
        if (model, blocks) not in cache:
            settings = {**CALM, **MODELS[model], "NUM_LAYERS": blocks}
            config = small(**settings, PLAN=Plan(), PIPELINED=False)
            cache[model, blocks] = losses(config, BATCHES)
        return cache[model, blocks]

    return get


def assert_equal(expected, model, plan):
    blocks = blocks_of(plan)
    settings = {**CALM, **MODELS[model], "NUM_LAYERS": blocks}
    found = losses(small(**settings, PLAN=plan), BATCHES)
    np.testing.assert_allclose(found, expected(model, blocks), rtol=1e-5, err_msg=str(plan))


def split(model, *more):
    """The rules of a mesh of three axes, with more dims along `model`."""
    return ";".join(["batch:data", *(f"{dim}:model" for dim in (*SPLIT[model], *more))])


# Differences beside those of the plan are noted.
CASES = [
    ("experts", Plan("model:2;layers:2;data:2", split("experts"), "zb_v", 4)),
    # Weights are cut over replicas, and tokens are split between products; two stages share a
    # table, and the norm is that of all slices.
    ("tied", Plan("layers:2;data:2;model:2", split("tied", "length") + ";embed:data", "1f1b", 2)),
]
RULES_OF_ONE_PROGRAM = "vocab:layers;heads:model;d_ff:model"
MORE_CASES = [
    ("dense", Plan("layers:2;data:2;model:2", split("dense"), "interleaved:2", 4)),
    # The embedding and the blocks of each replica lie on two devices, the softmax on one.
    ("dense", Plan("layers:2;data:2;model:2,1", split("dense"), "zb_h1", 2, (0, 3, 4))),
    ("experts", Plan("layers:2;data:2;model:2", split("experts"), "gpipe", 2, lowering="simd")),
    # The stages of one program share the vocabulary.
    ("tied", Plan("layers:2;model:2", RULES_OF_ONE_PROGRAM, "looped_bfs:2", 4, lowering="simd")),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "plan"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in MORE_CASES)],
    ids=lambda value: str(value).replace(" ", ","),
)
def test_losses_of_20_steps_are_those_of_the_plain_model(expected, model, plan):
    assert_equal(expected, model, plan)


@pytest.mark.slow
def test_the_gradient_is_clipped_in_some_steps(expected):
    """Else nothing would show that the norm is that of all slices."""
    settings = {**CALM, **MODELS["tied"], "CLIP_GRADIENT_NORM": 0.0}
    free = losses(small(**settings, PIPELINED=False, PLAN=Plan()), BATCHES)
    assert not np.allclose(free, expected("tied", 2), rtol=1e-4)
