"""Decoded tokens are those of the plain model, whatever the plan."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.decoding import BeamSearch, Decoder, Sampler
from pipemesh.errors import DecodingError, PipelineError
from pipemesh.plan import Plan
from pipemesh.training.trained_task import TrainedTask
from tests.decoding.models import (
    LENGTH,
    PLAIN,
    PROMPTS,
    SETTINGS,
    VOCAB_SIZE,
    decoder,
    greedy,
    in_order,
    one_program,
    prompts_of,
    tokens,
    trained,
    unpiped,
)
from tests.models.one_billion_word.language_model import small

pytestmark = pytest.mark.gpu

TOKENS = 9
CHOOSERS = {
    "greedy": Sampler(),
    "drawn": Sampler(temperature=1.3, top_k=30, top_p=0.7),
    "beams": BeamSearch(3),
}
ALL = "heads:model;d_ff:model;vocab:model"
EXPERTS = "heads:model;experts:model;vocab:model"
# Model, mesh, layout, schedule ("" for placement), groups, rows a group, chooser.
OFTEN = [
    ("dense", "layers:2;data:2", "batch:data;embed:data", "", 3, 2, "drawn"),
    ("tied", "model:2", ALL, "", 1, 4, "beams"),
    ("experts", "layers:2;model:2,1", EXPERTS, "", 2, 2, "drawn"),
    ("tied", "layers:2;data:2", "batch:data", "gpipe", 2, 2, "beams"),
    ("deep", "layers:2", "", "looped_bfs:2", 3, 2, "greedy"),
]
SELDOM = [
    ("dense", "layers:2;model:2,1", ALL, "", 2, 2, "greedy"),
    ("experts", "model:2", EXPERTS, "", 1, 4, "drawn"),
    ("experts", "layers:2;model:2", EXPERTS, "gpipe", 1, 4, "drawn"),
    ("dense", "layers:2;data:2", "batch:data;embed:data", "", 3, 2, "beams"),
    ("experts", "layers:2;data:2", "batch:data", "", 3, 2, "greedy"),
    ("dense", "layers:2", "", "", 1, 3, "greedy"),
    ("dense", "layers:4", "", "", 5, 1, "beams"),
    ("dense", "model:4", ALL, "", 2, 2, "greedy"),
    ("dense", "layers:2;model:2", f"{ALL};length:model", "", 2, 3, "greedy"),
    ("dense", "layers:2;cp:2", "length:cp", "", 2, 3, "greedy"),
    ("dense", "layers:2;data:2;model:2", f"batch:data;embed:data;{ALL}", "", 4, 2, "drawn"),
    ("dense", "layers:2;data:2;model:2", f"batch:data;{ALL}", "", 4, 2, "beams"),
    ("tied", "layers:2;data:2", "batch:data", "", 3, 2, "greedy"),
    ("experts", "layers:2;data:2;model:2", f"batch:data;embed:data;{EXPERTS}", "", 2, 2, "greedy"),
    ("tied", "layers:2;data:2", "batch:data", "gpipe", 2, 2, "drawn"),
    ("dense", "layers:1;model:2", ALL, "gpipe", 2, 3, "greedy"),
    ("dense", "layers:2;model:2", f"{ALL};length:model", "gpipe", 1, 4, "greedy"),
    ("dense", "layers:2;data:2;model:2", f"batch:data;{ALL}", "gpipe", 3, 2, "drawn"),
    ("deep", "layers:4", "", "gpipe", 3, 2, "greedy"),
    ("deep", "layers:2;data:2;model:2", f"batch:data;{ALL}", "gpipe", 4, 2, "beams"),
]


def cases():
    for case in OFTEN + SELDOM:
        model, mesh, layout, schedule, groups, rows, chooser = case
        plan = Plan(mesh, layout, num_microbatches=2)
        if schedule:
            plan = one_program(mesh, layout, schedule)
        mark = pytest.mark.slow if case in OFTEN else pytest.mark.exhaustive
        name = f"{model}-{mesh}-{plan.lowering}-{groups}x{rows}-{chooser}"
        yield pytest.param(model, plan, groups, rows, chooser, marks=mark, id=name)


@functools.cache
def plain(model, chooser="greedy"):
    """Returns the continuations of the model without a pipeline, all prompts at once."""
    with_all = decoder(unpiped(model), 1, len(PROMPTS), CHOOSERS[chooser])
    return in_order(with_all.generate(PROMPTS, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize(
    "model", [pytest.param("dense", marks=pytest.mark.exhaustive), "tied", "experts"]
)
def test_the_plain_model_equals_the_model_without_cache(eagerly, model):
    wanted = greedy(unpiped(model), PROMPTS, TOKENS)
    assert tokens(plain(model)) == [each for each, _ in wanted]
    for each, (_, logs) in zip(plain(model), wanted, strict=True):
        np.testing.assert_allclose(each.log_probs, logs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("model", "plan", "groups", "rows", "chooser"), list(cases()))
def test_tokens_do_not_depend_on_the_plan(eagerly, model, plan, groups, rows, chooser):
    made = decoder(trained(plan, model), groups, rows, CHOOSERS[chooser])
    # With a group of four, others wait for free rows: another graph.
    prompts = PROMPTS if rows == 4 else PROMPTS[: groups * rows]
    wanted = tokens(plain(model, chooser))[: len(prompts)]
    assert tokens(made.generate(prompts, TOKENS)) == wanted


def test_prompts_that_one_program_cannot_split_are_one_line(eagerly):
    task = trained(one_program("layers:1;data:2", "batch:data"))
    with pytest.raises(DecodingError, match="a group of 3 prompts cannot be split 2 ways, as the"):
        list(decoder(task, 1, 3).generate(PROMPTS, TOKENS))


def test_tokens_that_see_both_sides_are_not_continued(eagerly):
    plan = one_program("layers:2")
    params = small(**SETTINGS, PLAN=plan).Task()
    for layer in [layer for stage in params.stack.cell_tpl for layer in stage.sub][1:-1]:
        layer.attention_tpl.causal = False
    task = TrainedTask(params, plan, "CPU", 0, learns=False)
    with pytest.raises(PipelineError, match="causal=False sees both sides, so cached rows cannot"):
        list(decoder(task).generate(PROMPTS, TOKENS))


@pytest.mark.slow
def test_experts_have_room_for_all_tokens(eagerly):
    """They have the weights of those that would leave some out."""
    found = decoder(unpiped("crowded"), 1, len(PROMPTS)).generate(PROMPTS, TOKENS)
    assert tokens(found) == tokens(plain("experts"))


def test_another_seed_draws_others(eagerly):
    first = decoder(unpiped(), 1, 4, Sampler(temperature=0.8))
    sizes = {"rows": 4, "groups": 1, "length": LENGTH, "vocab_size": VOCAB_SIZE}
    other = Decoder(first._generator, seed=1, **sizes)
    found = [each for made in (first, other) for each in made.generate([PROMPTS[0]] * 4, TOKENS)]
    # Each prompt has its own numbers, too.
    assert len({each.tokens for each in found}) == 8


def test_a_stop_token_frees_a_row_for_another_prompt(eagerly):
    wanted = tokens(plain("dense"))
    stop = {wanted[0][3], wanted[3][1]}

    def cut(row):
        ends = [i for i, token in enumerate(row) if token in stop]
        return row[: ends[0] + 1] if ends else row

    made = decoder(unpiped(), 2, 1, stop=stop)
    found = list(made.generate(PROMPTS, TOKENS))
    assert tokens(found) == [cut(row) for row in wanted]
    for each in found:
        assert each.stopped == (each.tokens[-1] in stop)
        assert len(each.log_probs) == len(each.tokens)
    # Few graphs read many prompts: for all groups, or for one, of a length or two.
    many = prompts_of(*np.random.default_rng(0).integers(1, 15, 20))
    assert sorted(each.number for each in made.generate(many, TOKENS)) == list(range(20))
    assert made._generator._begin.experimental_get_tracing_count() <= 5


def test_a_text_may_fill_the_length_to_its_end(eagerly):
    (prompt,) = prompts_of(LENGTH - 3)
    (found,) = decoder(unpiped(), 1, 1).generate([prompt], 3)
    assert found.tokens == greedy(unpiped(), [prompt], 3)[0][0] and not found.stopped


@pytest.mark.parametrize(
    ("prompt", "number", "message"),
    [
        ([], 3, "prompt 1 is empty"),
        ([1] * 20, 5, "prompt 1 has 20 tokens, with 5 more .* 24; .* 4 at most"),
        ([1] * 24, 5, "it exceeds the model's 24; give a shorter one$"),
        ([1, VOCAB_SIZE], 3, f"prompt 1 has the token {VOCAB_SIZE}; ids are from 0 to"),
        ([-1], 3, "has the token -1"),
        ([1], 0, "max_tokens is 0"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_one_line(eagerly, prompt, number, message):
    with pytest.raises(DecodingError, match=message):
        decoder(unpiped(), 1, 1).check(prompt, number, 1)


def test_logits_that_are_not_numbers_end_decoding(eagerly):
    """Token 0 was said for ever, or nothing at all, and all seemed well."""
    task = trained(PLAIN, PIPELINED=False)
    (weight, *_) = (each for each in task.task.vars.Flatten() if len(each.shape) == 2)
    weight.assign(tf.fill(weight.shape, float("nan")))
    watched = []
    for chooser, options in (
        (Sampler(), {"watch": lambda *told: watched.append(told)}),
        (BeamSearch(3), {}),
    ):
        made = decoder(task, 1, 1, chooser, **options)
        with pytest.raises(DecodingError, match="logits are not numbers"):
            list(made.generate(PROMPTS[:1], 2))
    assert not watched


def test_nothing_is_left_of_what_was_not_finished(eagerly):
    made = decoder(unpiped(), 1, 3)
    found, wanted = [], tokens(plain("dense"))[:5]
    with pytest.raises(DecodingError, match="prompt 3 has the token 1000"):
        found.extend(made.generate([*PROMPTS[:3], [1000], PROMPTS[3]], TOKENS))
    # Prompts before an invalid one are continued.
    assert tokens(found) == wanted[:3]
    abandoned = made.generate(PROMPTS[:5], TOKENS)
    next(abandoned)
    abandoned.close()
    assert tokens(made.generate(PROMPTS[:5], TOKENS)) == wanted


@pytest.mark.parametrize(
    "make",
    [unpiped, functools.partial(trained, one_program("layers:2"))],
    ids=["stages", "simd"],
)
def test_a_group_may_be_continued_more_than_once(eagerly, make):
    """Its cache is overwritten in a copy."""
    generator = decoder(make(), 1, 2)._generator
    ids = np.array([PROMPTS[0], PROMPTS[0][::-1]], np.int32)
    seeds = np.zeros([2, 2], np.int32)
    ((group, _),) = generator.begin([0], [(ids, np.array([3, 3], np.int32), seeds)], [None])
    first, again = (generator.go_on([group], 5)[1][0][0].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (5, 2)
