"""What is noted of a training, without TensorFlow."""

import dataclasses
import json
import subprocess
import sys

import pytest

from models.one_billion_word.about import About, digests
from models.one_billion_word.corpus import Corpus, Sentences
from models.one_billion_word.sizes import Tiny
from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan


@pytest.fixture
def about(vocabulary):
    return About.of("Tiny", Tiny(), "CPU", {"train": "a", "heldout": "b"}, vocabulary)


def test_it_is_noted_as_json_and_read_as_it_was(about):
    assert About.from_note(json.loads(json.dumps(about.to_note()))) == about


@pytest.mark.parametrize("change", [{"vocabulary": None}, {"vocabulary": "abc"}, {"more": 1}, None])
def test_what_another_program_has_noted_is_told_in_a_line(about, change):
    """A log directory of another program ended in a traceback."""
    note = {"by": "me"} if change is None else about.to_note() | change
    with pytest.raises(CheckpointError, match=r"--logdir has checkpoints of another program, .*;"):
        About.from_note(note)


def test_another_model_is_refused_and_other_settings_are_listed(about, vocabulary):
    other = Tiny()
    other.BATCH_SIZE, other.SEED = 8, 3
    other.PLAN = Plan("layers:4", num_microbatches=8, compute_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"another model \(seed 0 -> 3\)"):
        about.check_model("Tiny", other, "runs")
    now = About.of("Tiny", other, "CPU", about.data, vocabulary)
    assert about.changes(now) == (
        "mesh layers:2 -> layers:4, compute_dtype none -> bfloat16, batch_size 16 -> 8"
    )


def test_what_was_chosen_is_kept_while_the_rest_of_the_plan_is_the_same(about, vocabulary):
    chosen = dataclasses.replace(Tiny.PLAN, num_microbatches=4, remat="none")
    there = dataclasses.replace(about, plan=chosen.to_values())
    again, other = Tiny(), Tiny()
    other.PLAN = dataclasses.replace(other.PLAN, schedule="gpipe")
    for settings, free, plan in ((again, (), chosen), (other, Tiny.CHOSEN, other.PLAN)):
        now = About.of("Tiny", settings, "CPU", about.data, vocabulary)
        assert there.keep_choice(now, settings) == free
        assert settings.PLAN == plan


def test_other_text_is_refused(about):
    about.check_data({"train": "a", "heldout": "b"}, "runs")
    with pytest.raises(CheckpointError, match=r"other text \(train a -> c\).*--other_text"):
        about.check_data({"train": "c", "heldout": "b"}, "runs")


def test_digests_tell_what_is_trained_on_from_what_is_judged_by():
    one, two, three = (Sentences((text,)) for text in ("one", "two", "three"))
    first = digests(Corpus("a", one, two))
    assert first == digests(Corpus("b", one, two))
    second = digests(Corpus("a", one, three))
    assert first["train"] == second["train"] and first["heldout"] != second["heldout"]


def test_it_needs_no_tensorflow():
    code = """
import sys
from models.one_billion_word import about, command_line, request, vocabulary
assert not {"tensorflow", "lingvo", "keras"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
