"""A run in a damaged folder ends as an undisturbed one, or refuses to resume."""

import json
import os
import shutil

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Folder, newest_whole
from pipemesh.errors import CheckpointError
from pipemesh.training import Batches, Saving
from tests.commands.program import done, run
from tests.training.damages import DAMAGES, is_told

STEPS = 6


def train(folder, steps):
    """Trains on numbers, a checkpoint each step; gives the first step and the weights."""
    state = {"global_step": tf.Variable(0), "w/var": tf.Variable(tf.zeros([64]))}
    batches = Batches(tf.data.Dataset.range(1000))
    os.makedirs(folder, exist_ok=True)
    with Folder(str(folder)):
        saving = Saving(str(folder), state)
        if found := newest_whole(str(folder)):
            batches.go_to(saving.restore(found[0]))
        saving.follow(batches)
        first = int(state["global_step"])
        for step in range(first + 1, steps + 1):
            number = tf.cast(batches.next() + 1, tf.float32)
            state["w/var"].assign(state["w/var"] * 0.9 + number * tf.range(64.0))
            state["global_step"].assign(step)
            saving.save(step, {}, lambda: None)
    return first, state["w/var"].numpy().tolist()


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """A folder after four steps, and what comes of it undisturbed."""
    folder = tmp_path_factory.mktemp("damages")
    train(folder / "begun", 4)
    return folder / "begun", train(folder / "whole", STEPS)[1]


@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_damage_is_set_right_or_refused(begun, tmp_path, capsys, damage):
    before, expected = begun
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    damage.harm(folder)
    capsys.readouterr()
    if damage.first is None:
        for _ in range(2):
            with pytest.raises(CheckpointError) as caught:
                train(folder, STEPS)
            assert is_told(damage, str(caught.value)) and "\n" not in str(caught.value)
        return
    assert train(folder, STEPS) == (damage.first, expected)
    assert is_told(damage, capsys.readouterr().err)
    assert train(folder, STEPS) == (STEPS, expected), "what it has done counts from now on"
    assert not capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The same for a training from the command line."""
    folder = tmp_path_factory.mktemp("trained")
    flags = ["--model=tests.training.small_models.PlainPoints", "--save_every=1", "--eval_every=99"]
    done("train", *flags, "--steps=4", f"--logdir={folder / 'begun'}")
    done("train", *flags, f"--steps={STEPS}", f"--logdir={folder / 'whole'}")
    return folder / "begun", final(folder / "whole")


def final(folder):
    """The score of all held-out data at the end."""
    lines = (folder / "record.jsonl").read_text().splitlines()
    return [each["judged"] for each in map(json.loads, lines) if each["event"] == "final"][-1]


@pytest.mark.slow
@pytest.mark.exhaustive
@pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name)
def test_a_command_sets_a_damage_right_or_refuses(trained, tmp_path, damage):
    before, expected = trained
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    damage.harm(folder)
    code, out, err = run("train", f"--steps={STEPS}", f"--logdir={folder}")
    assert "Traceback" not in err
    # Beside what is told of damage, the program says what it waits for.
    assert is_told(damage, err) or not damage.told
    if damage.first is None:
        assert code == 2 and not (folder / f"ckpt-{STEPS}.index").exists()
    else:
        assert code == 0, err
        assert f"going on from {folder}/ckpt-{damage.first}\n" in out
        assert final(folder) == expected
