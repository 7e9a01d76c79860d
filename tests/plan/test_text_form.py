"""The texts of a plan's values, and how they are joined."""

import pytest

from pipemesh.errors import MeshError, PipemeshError, PlanError
from pipemesh.mesh import LayoutRules, Mesh
from pipemesh.plan import Remat, text_form
from pipemesh.schedule import one_f_one_b


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("mesh", Mesh.from_text("layers:2;data:2"), "layers:2;data:2"),
        ("layout", LayoutRules.from_text("batch:data"), "batch:data"),
        ("layout", LayoutRules(), ""),
        ("schedule", "1f1b", "1f1b"),
        ("num_microbatches", 8, "8"),
        ("boundaries", (0, 3, 5), "0,3,5"),
        ("boundaries", None, ""),
        ("compute_dtype", "bfloat16", "bfloat16"),
        ("compute_dtype", None, ""),
        ("allow_idle", True, "true"),
        ("allow_idle", False, "false"),
        ("remat", Remat.FULL, "full"),
        ("remat", Remat(("full", "custom")), "full,custom"),
    ],
)
def test_values_and_texts_stand_for_each_other(name, value, text):
    assert text_form.of_value(value) == text
    found = text_form.parse(name, text)
    assert found == value and type(found) is type(value)


def test_a_schedule_as_a_table_comes_back():
    schedule = one_f_one_b(2, 3)
    text = text_form.of_value(schedule)
    assert text.startswith("table:")
    assert text_form.parse("schedule", text) == schedule
    with pytest.raises(PlanError, match="is no policy"):
        text_form.parse("remat", text)


@pytest.mark.parametrize(
    ("name", "text", "error", "message"),
    [
        ("mesh", "layers", MeshError, "layers"),
        ("schedule", "table:nonsense", PipemeshError, "nonsense"),
        ("num_microbatches", "four", PlanError, "'four' is no whole number"),
        ("num_microbatches", "-1", PlanError, "'-1' is no whole number"),
        ("boundaries", "0,,5", PlanError, "'' is no whole number"),
        ("allow_idle", "True", PlanError, "it must be true or false"),
    ],
)
def test_malformed_texts_are_errors(name, text, error, message):
    with pytest.raises(error, match=message):
        text_form.parse(name, text)


@pytest.mark.parametrize(
    "text", ["", "a b", "it's", '"', "a=b", "layers:2;data:2", "a\nb", "\\", "#", "$x", "ä*"]
)
def test_what_is_joined_can_be_split_and_so_with_json(text):
    texts = {"a": text, "b": "c"}
    assert text_form.from_json(text_form.to_json(texts)) == texts
    assert text_form.split(text_form.joined(texts)) == texts


def test_only_what_must_be_is_quoted():
    texts = {"mesh": "layers:2;data:2", "schedule": "a b", "layout": ""}
    assert text_form.joined(texts) == "mesh=layers:2;data:2 schedule='a b' layout=''"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("mesh=layers:2 1f1b", r"'1f1b' in plan .* is not name=value; write for example"),
        ("mesh=a mesh=b", "'mesh' is given twice in plan"),
        ("mesh='a", "cannot be read"),
        (None, "None"),
    ],
)
def test_a_text_that_is_no_plan_is_an_error(text, message):
    with pytest.raises(PlanError, match=message):
        text_form.split(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "the plan is no JSON"),
        ("[1]", r"the plan is \[1\]; it must be a JSON object of texts"),
        ('{"mesh": 2}', "'mesh' of the plan is 2; it must be a text"),
    ],
)
def test_json_that_is_no_plan_is_an_error(text, message):
    with pytest.raises(PlanError, match=message):
        text_form.from_json(text)
