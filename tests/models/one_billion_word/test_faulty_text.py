"""Text of odd kinds, text that vanishes, no room for its copies: the whole program."""

import shutil

import pytest

from tests.models.one_billion_word.disturbed import (
    STEPS,
    assert_kept,
    assert_same_losses,
    begin,
    losses,
    refused,
    running,
    told,
    wait_until,
)
from tests.models.one_billion_word.program import finish

pytestmark = pytest.mark.slow


def flags(folder):
    return [f"--data_dir={folder}", "--train_pattern=train-*", "--heldout_pattern=heldout"]


@pytest.fixture
def text(corpus, tmp_path):
    """Two files with corrupt UTF-8 and zero bytes, read to their ends every few steps."""
    folder = tmp_path / "text"
    folder.mkdir()
    for number in (1, 2):
        lines = [line.encode() for line in corpus.train.lines[number * 12 : number * 12 + 12]]
        lines[3] += b" \xff\xfe \xe2\x28 \x00\x00"
        (folder / f"train-{number}").write_bytes(b"\n".join(lines))
    heldout = "\n".join(corpus.heldout.lines[:9])
    (folder / "heldout").write_text(heldout, encoding="utf-8")
    return folder


@pytest.mark.exhaustive
def test_a_line_of_a_megabyte_and_a_flood_of_empty_ones_need_room_and_then_are_trained_on(
    disk, text, corpus, tmp_path
):
    line = " ".join(corpus.train.lines).encode()
    (text / "train-3").write_bytes(line * (1 + (1 << 20) // len(line)))
    (text / "train-4").write_bytes(b"one" + b"\n" * (1 << 21) + b"two\n")
    whole, logdir = tmp_path / "whole", tmp_path / "run"
    code, _, err = finish(begin(whole, *flags(text)))
    assert code == 0, err

    caches = disk(tmp_path / "caches", 1 << 19)
    options = {"env": {"XDG_CACHE_HOME": str(caches)}}
    line = refused(logdir, *flags(text), cold=True, **options)
    why = f"which fails in '{caches}/pipemesh/text' (No space left on device); make room, or name"
    assert line.startswith(f"'{text}/train-3' has to be copied to be read, 1.") and why in line
    assert not [path for path in caches.rglob(".*")], "half a copy"

    disk(caches, 1 << 26)
    # To learn it again takes long.
    shutil.copytree(whole / "vocabulary", logdir / "vocabulary")
    code, _, err = finish(begin(logdir, *flags(text), **options))
    assert code == 0, err
    assert_kept(logdir, STEPS, whole)
    assert losses(logdir) == losses(whole)


def test_a_file_that_vanishes_saves_and_once_it_is_back_the_same_command_goes_on(text, tmp_path):
    whole, logdir, err = tmp_path / "whole", tmp_path / "run", tmp_path / "err"
    assert finish(begin(whole, *flags(text), "--save_every=1000", steps=300))[0] == 0
    with running(logdir, err, *flags(text), "--max_to_keep=2") as process:
        wait_until((logdir / "ckpt-2.index").exists, process)
        (text / "train-1").rename(tmp_path / "kept")
        code, _, _ = finish(process)
    last = told(err.read_text())[-1]
    assert code == 2
    reached = max(int(path.stem.removeprefix("ckpt-")) for path in logdir.glob("ckpt-*.index"))
    gone = f"error: step {reached + 1}: the data to train on cannot be read any more ("
    assert last.startswith(gone) and f"{text}/train-1; No such file or directory" in last
    back = "put the data back and run the same command again to go on"
    assert last.endswith(f"; saved {logdir}/ckpt-{reached}: {back}")

    # Without it the same command is refused, and what is saved stays.
    line = refused(logdir, *flags(text), steps=reached + 9, cold=True)
    assert "holds a checkpoint that was trained on other text (train " in line
    (tmp_path / "kept").rename(text / "train-1")
    code, out, told_now = finish(begin(logdir, *flags(text), steps=reached + 9))
    assert code == 0, told_now
    assert f"going on from {logdir}/ckpt-{reached}\n" in out
    assert reached + 9 < 300, "it came too far to be compared"
    assert_same_losses(logdir, losses(whole))
    assert max(losses(logdir)) == reached + 9
