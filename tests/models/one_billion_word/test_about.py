"""What lies beside a checkpoint: whole, and without TensorFlow."""

import random
import subprocess
import sys

import pytest

from models.one_billion_word.about import About, CheckpointError, changes, digests
from models.one_billion_word.corpus import Corpus, Sentences
from models.one_billion_word.sizes import Tiny


@pytest.fixture
def about(vocabulary):
    return About.of("Tiny", Tiny(), "layers:2", {"train": "a", "heldout": "b"}, vocabulary)


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
    other.BATCH_SIZE, other.COMPUTE_DTYPE, other.SEED = 8, "bfloat16", 3
    with pytest.raises(CheckpointError, match=r"another model \(seed 0 there, 3 now\)"):
        about.check_model("Tiny", other, "runs")
    now = About.of("Tiny", other, "layers:4", about.data, vocabulary)
    assert changes(about.settings, now.settings) == (
        "mesh layers:2 there, layers:4 now, batch_size 16 there, 8 now, "
        "compute_dtype None there, bfloat16 now"
    )


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
