"""Nothing but speed depends on the plan: each gives the losses of the plain model."""

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from pipemesh.errors import PipemeshError
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


SCHEDULES = ("gpipe", "1f1b", "interleaved:2", "zb_h1", "zb_v")
NAMES = (("data", "model"), ("rows", "tensor"), ("b", "a"))


# Each with as many blocks a stage.
SIMD_SCHEDULES = ("gpipe", "looped_bfs:2")


def plan_of(
    model,
    layers,
    data,
    size,
    schedule,
    microbatches,
    names,
    order,
    lowering="placement",
    with_rows=(),
    with_tensor=(),
):
    """A plan of these sizes along its three axes; None if there is none.

    The last size may be a text of several; further dims are split as the batch is, or as heads are.
    """
    rows, tensor = names
    axes = [("layers", layers), (rows, data), (tensor, size)]
    mesh = ";".join(f"{axes[i][0]}:{axes[i][1]}" for i in order)
    rules = [f"{dim}:{rows}" for dim in ("batch", *with_rows)]
    rules += [f"{dim}:{tensor}" for dim in (*SPLIT[model], *with_tensor)]
    try:
        plan = Plan(mesh, ";".join(rules), schedule, microbatches, lowering=lowering)
        plan.check_batch(BATCHES[0]["ids"].shape[0])
        plan.check_layers(blocks_of(plan) + 2)
    except PipemeshError:
        return None
    if lowering == "simd" and blocks_of(plan) % plan.num_stages:
        return None
    return plan if 1 < plan.mesh.num_devices <= 8 else None


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


@strategies.composite
def legal_plans(draw):
    model = draw(strategies.sampled_from(list(MODELS)))
    lowering = draw(strategies.sampled_from(["placement", "simd"]))
    sizes = [draw(strategies.sampled_from((1, 2, 4))) for _ in range(3)]
    # Layers that share a weight are cut alike.
    if lowering == "placement" and model != "tied" and draw(strategies.booleans()):
        sizes[2] = ",".join(str(draw(strategies.sampled_from((1, 2, 4)))) for _ in range(sizes[0]))
    plan = plan_of(
        model,
        *sizes,
        draw(strategies.sampled_from(SCHEDULES if lowering == "placement" else SIMD_SCHEDULES)),
        draw(strategies.sampled_from((1, 2, 4, 8))),
        draw(strategies.sampled_from(NAMES)),
        draw(strategies.permutations(range(3))),
        lowering,
        draw(strategies.sampled_from([(), ("embed",)])),
        draw(strategies.sampled_from([(), ("length",)])),
    )
    hypothesis.assume(plan is not None)
    return model, plan


@pytest.mark.exhaustive
@pytest.mark.timeout(7200)
@hypothesis.settings(
    max_examples=200,
    suppress_health_check=list(hypothesis.HealthCheck),
    phases=[hypothesis.Phase.generate],
)
@hypothesis.given(legal_plans())
def test_losses_under_any_legal_plan(expected, case):
    assert_equal(expected, *case)


@pytest.mark.slow
def test_the_gradient_is_clipped_in_some_steps(expected):
    """Else nothing would show that the norm is that of all slices."""
    settings = {**CALM, **MODELS["tied"], "CLIP_GRADIENT_NORM": 0.0}
    free = losses(small(**settings, PIPELINED=False, PLAN=Plan()), BATCHES)
    assert not np.allclose(free, expected("tied", 2), rtol=1e-4)
