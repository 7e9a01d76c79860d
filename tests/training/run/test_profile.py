"""Profiles of some steps."""

import os

import pytest
import tensorflow as tf

from pipemesh.training.run.profile import Profile
from tests.commands.program import refused
from tests.training.run.test_telling import events, trained

MODEL = "--model=tests.training.small_models.PlainPoints"


def files(logdir):
    return list(logdir.glob("plugins/profile/*/*.xplane.pb"))


def test_a_training_writes_the_profile_of_its_steps(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, profile_steps=(3, 4)) == 0
    (path,) = files(tmp_path)
    assert f"profile: {path.parent}\n" in capsys.readouterr().out
    (told,) = [event for event in events(tmp_path) if event["event"] == "profile"]
    assert (told["step"], told["path"]) == (4, str(path.parent))
    # What ran, and in which step.
    content = path.read_bytes()
    assert b"MatMul" in content and b"step_num" in content


def test_steps_that_do_not_come_are_missing_in_it(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 5, stop=3, profile_steps=(2, 5)) == 143
    kinds = [event["event"] for event in events(tmp_path)]
    assert kinds[-1] == "end" and kinds.count("profile") == 1
    assert len(files(tmp_path)) == 1


def test_steps_that_are_done_are_told(eagerly, tmp_path, capsys):
    assert trained(tmp_path, 2) == 0
    path = tmp_path / "ckpt-2"
    assert trained(tmp_path, 3, restore=path, profile_steps=(1, 2)) == 0
    assert "are done; there is no profile" in capsys.readouterr().err
    assert files(tmp_path) == []


def test_a_profile_that_cannot_be_written_is_told_and_ends_nothing(eagerly, tmp_path, capsys):
    (tmp_path / "plugins").write_text("a file stands in its place")
    assert trained(tmp_path, 3, profile_steps=(2, 3)) == 0
    assert "there is no profile (" in capsys.readouterr().err


def test_only_one_profile_may_run(tmp_path):
    tf.profiler.experimental.start(str(tmp_path / "other"))
    try:
        told = []
        profile = Profile(str(tmp_path), (1, 2), told.append)
        for step in (1, 2):
            with profile.around(step):
                pass
    finally:
        tf.profiler.experimental.stop()
    assert len(told) == 1 and told[0].startswith("there is no profile (")
    assert profile.written is None and os.listdir(tmp_path) == ["other"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("10", "give the first and the last step, such as 10:15"),
        ("a:b", "give the first and the last step, such as 10:15"),
        ("0:3", "the first step is at least 1"),
        ("5:4", "the last one not before it"),
        ("2:10", "training ends at step 9; give more --steps"),
    ],
)
def test_steps_are_checked_before_the_first_one(tmp_path, value, told):
    line = refused("train", MODEL, f"--logdir={tmp_path}", "--steps=9", f"--profile_steps={value}")
    assert line.startswith(f"error: --profile_steps='{value}'") and told in line
    assert not (tmp_path / "record.jsonl").exists()
