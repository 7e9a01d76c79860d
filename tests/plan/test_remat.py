"""Policies of recomputation as values; `tests/recurrent/test_remat.py` has the executor's side."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.plan.remat import CUSTOM, NAMES, Remat
from pipemesh.schedule import gpipe, one_f_one_b

texts = st.lists(st.sampled_from((*NAMES, CUSTOM)), min_size=1, max_size=4).map(",".join)


@given(texts)
def test_text_parses_back(text):
    remat = Remat.from_text(text)
    assert str(remat) == text and Remat.from_text(str(remat)) == remat
    assert hash(remat) == hash(Remat.from_text(text))


@given(texts)
def test_modes_of_a_stage_are_those_of_its_policy(text):
    remat = Remat.from_text(text)
    table = one_f_one_b(max(2, len(remat.policies)), 4)
    modes = remat.modes(table)
    assert modes.keys() == {(s, m) for s in range(table.num_stages) for m in range(4)}
    policies = remat.policies * (table.num_stages if len(remat.policies) == 1 else 1)
    for (stage, microbatch), mode in modes.items():
        assert Remat((policies[stage],)).modes(table)[stage, microbatch] == mode
    assert not remat.is_none or {*modes.values()} == {"none"}
    assert not remat.is_full or {*modes.values()} == {"full"}
    assert remat.is_custom == (CUSTOM in text)


def test_except_last_keeps_microbatches_that_turn_at_once():
    table = gpipe(2, 2)
    modes = Remat.from_text("except_last,none").modes(table)
    assert modes == {(0, 0): "full", (0, 1): "none", (1, 0): "none", (1, 1): "none"}
    assert Remat.CUSTOM.modes(table) == Remat.FULL.modes(table)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("ful", "'ful' is no policy; did you mean 'full'"),
        ("full,", "'' is no"),
        (3, "3 is no text"),
    ],
)
def test_unknown_policies_are_errors(text, told):
    with pytest.raises(PlanError, match=told):
        Remat.from_text(text)


def test_there_is_one_policy_for_each_stage():
    remat = Remat.from_text("full,none")
    with pytest.raises(PlanError, match="has 2 policies, but there are 3 stages; give one policy"):
        remat.modes(gpipe(3, 2))
