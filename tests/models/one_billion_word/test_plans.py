"""Nothing but speed depends on the plan: every one gives the losses of the plain model."""

import itertools
import random

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


def drawn(model, number, seed, schedules=SCHEDULES, lowering="placement"):
    """Legal plans, drawn so that each schedule and each mesh has its turn."""
    draw = random.Random(seed)
    meshes = [m for m in itertools.product((1, 2, 4), repeat=3) if 1 < np.prod(m) <= 8]
    draw.shuffle(meshes)
    turns = itertools.count()
    found = []
    while len(found) < number:
        turn = next(turns)
        plan = plan_of(
            model,
            *meshes[turn % len(meshes)],
            schedules[turn % len(schedules)],
            draw.choice([2, 4, 8]),
            draw.choice(NAMES),
            draw.sample(range(3), 3),
            lowering,
        )
        if plan is not None and plan not in found:
            found.append(plan)
    return found


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


def cases():
    for model, number, by_default in (("dense", 30, 1), ("tied", 10, 1), ("experts", 10, 1)):
        for i, plan in enumerate(drawn(model, number, seed=1)):
            marks = [pytest.mark.slow] if i < by_default else [pytest.mark.exhaustive]
            yield pytest.param(model, plan, id=f"{model}-{plan}", marks=marks)
    for model, number, by_default in (("dense", 12, 1), ("tied", 6, 0), ("experts", 6, 1)):
        plans = drawn(model, number, seed=2, schedules=SIMD_SCHEDULES, lowering="simd")
        for i, plan in enumerate(plans):
            marks = [pytest.mark.slow] if i < by_default else [pytest.mark.exhaustive]
            yield pytest.param(model, plan, id=f"{model}-{plan}", marks=marks)


@pytest.mark.parametrize(("model", "plan"), list(cases()))
def test_losses_of_20_steps_are_those_of_the_plain_model(expected, model, plan):
    assert_equal(expected, model, plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "lowering"),
    [
        ("dense", "placement"),
        pytest.param("tied", "placement", marks=pytest.mark.exhaustive),
        pytest.param("experts", "placement", marks=pytest.mark.exhaustive),
        pytest.param("dense", "simd", marks=pytest.mark.exhaustive),
        pytest.param("experts", "simd", marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_the_same_where_tokens_are_split_between_products(expected, model, lowering):
    rules = ";".join(f"{dim}:model" for dim in ("length", *SPLIT[model]))
    schedule = "gpipe" if lowering == "simd" else "zb_h1"
    mesh = "layers:2;data:2;model:2"
    plan = Plan(mesh, f"batch:data;{rules}", schedule, 2, lowering=lowering)
    assert_equal(expected, model, plan)


@pytest.mark.slow
def test_losses_are_the_same_where_weights_are_cut_over_the_replicas(expected):
    """With a table that two stages share, and clipped by the norm of all slices."""
    rules = ";".join(f"{dim}:model" for dim in SPLIT["tied"])
    plan = Plan("layers:2;data:2;model:2", f"batch:data;embed:data;{rules}", "1f1b", 2)
    assert_equal(expected, "tied", plan)


@pytest.mark.slow
def test_losses_are_the_same_where_the_softmax_has_a_device_of_its_own(expected):
    """The embedding and the blocks of each replica lie on two devices, the softmax on one."""
    rules = ";".join(f"{dim}:model" for dim in SPLIT["dense"])
    mesh, boundaries = "layers:2;data:2;model:2,1", (0, 3, 4)
    plan = Plan(mesh, f"batch:data;{rules}", "1f1b", 2, boundaries)
    assert_equal(expected, "dense", plan)


@pytest.mark.slow
@pytest.mark.parametrize(
    "schedule", [pytest.param("gpipe", marks=pytest.mark.exhaustive), "looped_bfs:2"]
)
def test_the_vocabulary_may_be_split_over_the_stages_of_one_program(expected, schedule):
    rules = "vocab:layers;heads:model;d_ff:model"
    plan = Plan("layers:2;model:2", rules, schedule, num_microbatches=4, lowering="simd")
    assert_equal(expected, "tied", plan)


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


def test_the_drawn_plans_have_every_schedule_and_every_mesh():
    plans = drawn("dense", 30, seed=1)
    assert {plan.schedule for plan in plans} == set(SCHEDULES)
    assert {tuple(sorted(plan.mesh.axis_names)) for plan in plans} == {
        tuple(sorted(("layers", *names))) for names in NAMES
    }
    assert len({plan.num_microbatches for plan in plans}) == 3
    plans = drawn("dense", 12, seed=2, schedules=SIMD_SCHEDULES, lowering="simd")
    assert {plan.schedule for plan in plans} == set(SIMD_SCHEDULES)
    assert {plan.mesh.num_stages for plan in plans} == {1, 2, 4}


@pytest.mark.slow
def test_the_gradient_is_clipped_in_some_steps():
    """Else nothing would show that the norm is that of all slices."""
    free = losses(
        small(**{**CALM, "CLIP_GRADIENT_NORM": 0.0}, PIPELINED=False, PLAN=Plan()), BATCHES
    )
    clipped = losses(small(**CALM, PIPELINED=False, PLAN=Plan()), BATCHES)
    assert not np.allclose(free, clipped, rtol=1e-4)
