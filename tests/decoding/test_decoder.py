"""Decoded tokens are those of the plain model, whatever the plan."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.decoding import BeamSearch, Sampler
from pipemesh.errors import DecodingError
from pipemesh.plan import Plan
from tests.decoding.models import (
    LENGTH,
    PLAIN,
    PROMPTS,
    VOCAB_SIZE,
    decoder,
    greedy,
    one_program,
    prompts_of,
    tokens,
    trained,
)

TOKENS = 9
CHOOSERS = {
    "greedy": Sampler(),
    "warm": Sampler(temperature=0.8),
    "top_k": Sampler(temperature=1.0, top_k=5),
    "top_p": Sampler(temperature=1.3, top_k=30, top_p=0.7),
    "beams": BeamSearch(3),
}
ALL = "heads:model;d_ff:model;vocab:model"
EXPERTS = "heads:model;experts:model;vocab:model"
# Plan, groups, rows a group.
PLANS = [
    ("layers:2", "", 1, 3),
    ("layers:2", "", 2, 2),
    ("layers:4", "", 2, 2),
    ("layers:4", "", 5, 1),
    ("model:2", ALL, 1, 4),
    ("model:4", ALL, 2, 2),
    ("layers:1;data:2", "batch:data", 2, 2),
    ("layers:2;data:2", "batch:data", 3, 2),
    ("layers:2;model:2", ALL, 2, 3),
    ("layers:2;model:2", f"{ALL};length:model", 2, 3),
    ("layers:2;data:2;model:2", f"batch:data;{ALL}", 4, 2),
    ("layers:2;data:2;model:2", f"batch:data;embed:data;{ALL}", 2, 2),
    ("layers:2;model:2,1", ALL, 2, 2),
]
# Model, mesh, layout, schedule, groups, rows a group.
PROGRAMS = [
    ("dense", "layers:2", "", "gpipe", 2, 2),
    ("dense", "layers:2", "", "gpipe", 3, 1),
    ("dense", "layers:1;model:2", ALL, "gpipe", 2, 3),
    ("dense", "layers:2;model:2", f"{ALL};length:model", "gpipe", 1, 4),
    ("dense", "layers:2;data:2;model:2", f"batch:data;{ALL}", "gpipe", 3, 2),
    ("tied", "layers:2;data:2", "batch:data", "gpipe", 2, 2),
    ("experts", "layers:2;model:2", EXPERTS, "gpipe", 2, 2),
    ("deep", "layers:4", "", "gpipe", 3, 2),
    ("deep", "layers:2;model:2", ALL, "looped_bfs:2", 3, 2),
    ("deep", "layers:2;data:2;model:2", f"batch:data;{ALL}", "gpipe", 4, 2),
]
CASES = [
    *(("dense", *plan) for plan in PLANS),
    *(("tied", *plan) for plan in PLANS[:-1][1::3]),
    *(("experts", *(plan[0], plan[1].replace(ALL, EXPERTS), *plan[2:])) for plan in PLANS[1::3]),
]
PLACED = [
    (model, Plan(mesh, layout, num_microbatches=2), groups, rows)
    for model, mesh, layout, groups, rows in CASES
]
TOGETHER = [
    (model, one_program(mesh, layout, schedule), groups, rows)
    for model, mesh, layout, schedule, groups, rows in PROGRAMS
]
# Of the others each has something that no other one has.
BY_DEFAULT = [PLACED[i] for i in (11, 12, 14, len(PLACED) - 2)] + [TOGETHER[i] for i in (6, 7, 8)]


def marked(often):
    for case in PLACED + TOGETHER:
        mark = pytest.mark.slow if case in often else pytest.mark.exhaustive
        model, plan = case[:2]
        yield pytest.param(*case, marks=mark, id=f"{model}-{plan.mesh}-{plan.lowering}-{case[2:]}")


@functools.cache
def plain(model, chooser="greedy"):
    """Returns the continuations of the model without a pipeline, all prompts at once."""
    task = trained(PLAIN, model, PIPELINED=False)
    with_all = decoder(task, 1, len(PROMPTS), CHOOSERS[chooser])
    return tokens(with_all.generate(PROMPTS, TOKENS))


@pytest.mark.slow
@pytest.mark.parametrize("model", ["dense", "tied", "experts"])
def test_the_plain_model_equals_the_model_without_cache(eagerly, model):
    task = trained(PLAIN, model, PIPELINED=False)
    wanted = greedy(task, PROMPTS, TOKENS)
    found = sorted(
        decoder(task, 1, len(PROMPTS)).generate(PROMPTS, TOKENS), key=lambda each: each.number
    )
    assert [each.tokens for each in found] == [each for each, _ in wanted]
    for each, (_, logs) in zip(found, wanted, strict=True):
        np.testing.assert_allclose(each.log_probs, logs, rtol=1e-4, atol=1e-5)
    assert plain(model) == [each for each, _ in wanted]


@pytest.mark.parametrize(("model", "plan", "groups", "rows"), list(marked(BY_DEFAULT)))
def test_tokens_do_not_depend_on_the_plan(eagerly, model, plan, groups, rows):
    found = decoder(trained(plan, model), groups, rows).generate(PROMPTS, TOKENS)
    assert tokens(found) == plain(model)


@pytest.mark.parametrize(
    ("model", "plan", "groups", "rows"), list(marked([PLACED[10], TOGETHER[4]]))
)
def test_drawn_and_searched_tokens_do_not_depend_on_the_plan(eagerly, model, plan, groups, rows):
    task = trained(plan, model)
    for name in list(CHOOSERS)[1:]:
        found = decoder(task, groups, rows, CHOOSERS[name]).generate(PROMPTS, TOKENS)
        assert tokens(found) == plain(model, name), name
        assert plain(model, name) != plain(model)


def test_prompts_that_one_program_cannot_split_are_one_line(eagerly):
    task = trained(one_program("layers:1;data:2", "batch:data"))
    with pytest.raises(DecodingError, match="a group of 3 prompts cannot be split 2 ways, as the"):
        list(decoder(task, 1, 3).generate(PROMPTS, TOKENS))


@pytest.mark.slow
def test_experts_have_room_for_all_tokens(eagerly):
    """They have the weights of those that would leave some out."""
    found = decoder(trained(PLAIN, "crowded", PIPELINED=False), 3, 1).generate(PROMPTS, TOKENS)
    assert tokens(found) == plain("experts")


def test_another_seed_draws_others(eagerly):
    task = trained(PLAIN, PIPELINED=False)
    make = functools.partial(decoder, task, 1, 4, CHOOSERS["warm"])
    first, other = (tokens(make(seed=seed).generate([PROMPTS[0]] * 4, TOKENS)) for seed in (0, 1))
    # Each prompt has its own numbers, too.
    assert len({*first, *other}) == 8


def test_a_stop_token_frees_a_row_for_another_prompt(eagerly):
    task = trained(PLAIN, PIPELINED=False)
    wanted = plain("dense")
    stop = {wanted[0][3], wanted[3][1]}

    def cut(row):
        ends = [i for i, token in enumerate(row) if token in stop]
        return row[: ends[0] + 1] if ends else row

    found = list(decoder(task, 2, 1, stop=stop).generate(PROMPTS, TOKENS))
    assert tokens(found) == [cut(row) for row in wanted]
    for each in found:
        assert each.stopped == (each.tokens[-1] in stop)
        assert len(each.log_probs) == len(each.tokens)


def test_a_text_may_fill_the_length_to_its_end(eagerly):
    task = trained(PLAIN, PIPELINED=False)
    (prompt,) = prompts_of(LENGTH - 3)
    (found,) = decoder(task, 1, 1).generate([prompt], 3)
    assert found.tokens == greedy(task, [prompt], 3)[0][0] and not found.stopped


@pytest.mark.parametrize(
    ("prompt", "number", "message"),
    [
        ([], 3, "prompt 1 is empty"),
        (
            [1] * 20,
            5,
            "prompt 1 has 20 tokens, with 5 more .* 24; .* 4 at most",
        ),
        ([1] * 24, 5, "it exceeds the model's 24; give a shorter one$"),
        ([1, VOCAB_SIZE], 3, f"prompt 1 has the token {VOCAB_SIZE}; ids are from 0 to"),
        ([-1], 3, "has the token -1"),
        ([1], 0, "max_tokens is 0"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_one_line(eagerly, prompt, number, message):
    made = decoder(trained(PLAIN, PIPELINED=False), 1, 1)
    with pytest.raises(DecodingError, match=message):
        list(made.generate([[1], prompt], number))


def test_logits_that_are_not_numbers_end_decoding(eagerly):
    """Token 0 was said for ever, or nothing at all, and all seemed well."""
    task = trained(PLAIN, PIPELINED=False)
    (weight, *_) = (each for each in task.task.vars.Flatten() if len(each.shape) == 2)
    weight.assign(tf.fill(weight.shape, float("nan")))
    watched = []
    for name in ("greedy", "warm", "beams"):
        options = {} if name == "beams" else {"watch": lambda *told: watched.append(told)}
        made = decoder(task, 1, 1, CHOOSERS[name], **options)
        with pytest.raises(DecodingError, match="logits are not numbers"):
            list(made.generate(PROMPTS[:1], 2))
    assert not watched


def test_prompts_before_an_invalid_one_are_continued(eagerly):
    made = decoder(trained(PLAIN, PIPELINED=False), 2, 3)
    found = []
    with pytest.raises(DecodingError, match="prompt 3 has the token 1000"):
        found.extend(made.generate([*PROMPTS[:3], [1000], PROMPTS[3]], TOKENS))
    assert sorted(each.number for each in found) == [0, 1, 2]
    assert tokens(found) == plain("dense")[:3]
    # Nor is anything left of it.
    assert tokens(made.generate(PROMPTS, TOKENS)) == plain("dense")


def test_an_abandoned_generator_leaves_no_rows(eagerly):
    made = decoder(trained(PLAIN, PIPELINED=False), 2, 2)
    found = made.generate(PROMPTS, TOKENS)
    next(found)
    found.close()
    assert tokens(made.generate(PROMPTS[:1], TOKENS)) == plain("dense")[:1]


def test_few_graphs_read_many_prompts(eagerly):
    """For all groups, or for one, of a length or two: not for each set of groups."""
    stop = {row[i] for row in plain("dense") for i in (0, 3)}
    made = decoder(trained(PLAIN, PIPELINED=False), 3, 2, stop=stop)
    many = prompts_of(*np.random.default_rng(0).integers(1, 15, 40))
    found = list(made.generate(many, TOKENS))
    assert sorted(each.number for each in found) == list(range(40))
    assert made._generator._begin.experimental_get_tracing_count() <= 5


@pytest.mark.parametrize(
    "plan", [Plan("layers:2", num_microbatches=2), one_program("layers:2")], ids=["stages", "simd"]
)
def test_a_group_may_be_continued_more_than_once(eagerly, plan):
    """Its cache is overwritten in a copy."""
    task = trained(plan)
    generator = decoder(task, 1, 2)._generator
    ids = np.array([PROMPTS[0], PROMPTS[0][::-1]], np.int32)
    seeds = np.zeros([2, 2], np.int32)
    ((group, _),) = generator.begin([0], [(ids, np.array([3, 3], np.int32), seeds)], [None])
    first, again = (generator.go_on([group], 5)[1][0][0].numpy() for _ in range(2))
    np.testing.assert_array_equal(first, again)
    assert first.shape == (5, 2)
