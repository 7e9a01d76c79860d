"""What lies beside a checkpoint: whole, and without TensorFlow."""

import dataclasses
import hashlib
import json
import random
import subprocess
import sys

import pytest

from models.one_billion_word.about import About, CheckpointError, digests
from models.one_billion_word.corpus import Corpus, Sentences
from models.one_billion_word.sizes import Tiny
from pipemesh.plan import Plan


@pytest.fixture
def about(vocabulary):
    return About.of("Tiny", Tiny(), "CPU", {"train": "a", "heldout": "b"}, vocabulary)


def test_it_is_read_as_it_was_written(about, tmp_path):
    about.write(str(tmp_path / "ckpt-3"))
    assert [path.name for path in tmp_path.iterdir()] == ["ckpt-3.about"]
    assert About.read(str(tmp_path / "ckpt-3")) == about


def test_no_flipped_bit_passes(about, tmp_path):
    about.write(str(tmp_path / "ckpt-3"))
    path = tmp_path / "ckpt-3.about"
    good = path.read_bytes()
    rng = random.Random(0)
    for _ in range(300):
        bad = bytearray(good)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CheckpointError, match=r"ckpt-3\.about is damaged.*remove .*ckpt-3\.\*"):
            About.read(str(tmp_path / "ckpt-3"))


def test_another_programs_checkpoint_has_none(tmp_path):
    with pytest.raises(CheckpointError, match=r"ckpt-3 is a checkpoint of another program"):
        About.read(str(tmp_path / "ckpt-3"))


def test_another_model_is_refused_and_other_settings_are_listed(about, vocabulary):
    other = Tiny()
    other.BATCH_SIZE, other.SEED = 8, 3
    other.PLAN = Plan("layers:4", num_microbatches=8, compute_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"another model \(seed 0 there, 3 now\)"):
        about.check_model("Tiny", other, "runs")
    now = About.of("Tiny", other, "CPU", about.data, vocabulary)
    assert about.changes(now) == (
        "mesh layers:2 there, layers:4 now, compute_dtype none there, bfloat16 now, "
        "batch_size 16 there, 8 now"
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


def test_what_was_written_before_there_were_plans_is_read(about, tmp_path):
    path = tmp_path / "ckpt-3.about"
    about.write(str(path.with_suffix("")))
    values = json.loads(path.read_bytes().partition(b"\n")[2])
    del values["plan"]
    values["settings"] |= {
        "mesh": "layers:2;data:2 batch:data GPU",
        "num_micro_batches": 4,
        "schedule": "zb_h1",
        "remat": "none",
        "compute_dtype": None,
    }
    del values["settings"]["device_type"]
    content = json.dumps(values).encode()
    path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)
    read = About.read(str(path.with_suffix("")))
    assert Plan.from_values(read.plan) == Plan(
        "layers:2;data:2", "batch:data", "zb_h1", 4, remat="none"
    )
    assert read.settings == {**about.settings, "device_type": "GPU"}


def test_other_text_is_refused(about):
    about.check_data({"train": "a", "heldout": "b"}, "runs")
    with pytest.raises(CheckpointError, match=r"other text \(train a there, c now\).*--other_text"):
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
from models.one_billion_word import about, command_line, console, logdir, vocabulary
assert not {"tensorflow", "lingvo", "keras"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
