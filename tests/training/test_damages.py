"""A run in a damaged folder ends as an undisturbed one, or refuses to resume, in one line."""

import hashlib
import json
import os
import re
import shutil

import pytest
import tensorflow as tf

from pipemesh.checkpoint import Folder, newest_whole
from pipemesh.errors import CheckpointError
from pipemesh.training import Batches
from pipemesh.training.saving import Saving

ENDS = ("index", "data-00000-of-00001", "manifest")
INDEX, DATA, MANIFEST = ENDS
STEPS = 6


def file_of(folder, end, step=4):
    return folder / f"ckpt-{step}.{end}"


def each(harm, *ends):
    """Harms files of the newest checkpoint."""
    return lambda folder: [harm(file_of(folder, end)) for end in ends]


def flip(where):
    def harm(path):
        content = bytearray(path.read_bytes())
        content[int(where * (len(content) - 1))] ^= 4
        path.write_bytes(content)

    return harm


def cut(path):
    os.truncate(path, path.stat().st_size // 2)


def empty(path):
    os.truncate(path, 0)


def lengthen(path):
    path.write_bytes(path.read_bytes() + b"\0")


def make_folder(path):
    path.unlink()
    path.mkdir()


def link_to(target):
    def harm(path):
        path.unlink()
        path.symlink_to(target or path.name)

    return harm


def edit(**changes):
    """Changes the manifest, and its digest with it."""

    def harm(path):
        values = json.loads(path.read_bytes().partition(b"\n")[2]) | changes
        content = json.dumps(values).encode()
        path.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)

    return harm


def move(old, new, *ends, do=os.replace):
    return lambda folder: [do(file_of(folder, end, old), file_of(folder, end, new)) for end in ends]


def exchange(*ends):
    return lambda folder: [move(old, new, *ends)(folder) for old, new in ((4, 99), (3, 4), (99, 3))]


def leave_unfinished(folder):
    temporary = folder / "ckpt-5_temp"
    temporary.mkdir()
    shutil.copy(file_of(folder, DATA), temporary / f"ckpt-5.{DATA}")
    shutil.copy(file_of(folder, DATA), file_of(folder, DATA, 5))


def each_step(harm):
    return lambda folder: [harm(file_of(folder, DATA, step)) for step in (2, 3, 4)]


RENAMED = "and its files were renamed; set aside"
NOT_WRITTEN = "has changed since it was written; set aside"
SIZE = r"data-.* bytes of .*; set aside"
ALL = "has no whole checkpoint, only damaged ones"
LOOP = r"cannot be read \(Too many levels of symbolic links\)"
# The damage of a folder with the checkpoints of steps 2, 3 and 4, the report on standard error
# ("" for none), and the step from which the run resumes; None if it refuses.
DAMAGES = {
    "data cut short": (each(cut, DATA), SIZE, 3),
    "data empty": (each(empty, DATA), "has 0 bytes of", 3),
    "data too long": (each(lengthen, DATA), SIZE, 3),
    "data with a flipped bit": (each(flip(0), DATA), "cannot be read", 3),
    "data removed": (each(os.unlink, DATA), "is missing; set aside", 3),
    "data a folder": (each(make_folder, DATA), "is a folder; set aside", 3),
    "data a link to nothing": (each(link_to("nothing"), DATA), "is missing; set aside", 3),
    **{f"{end} a link to itself": (each(link_to(None), end), LOOP, None) for end in ENDS},
    "index cut short": (each(cut, INDEX), NOT_WRITTEN, 3),
    "index with a flipped bit": (each(flip(0.5), INDEX), NOT_WRITTEN, 3),
    "index removed": (each(os.unlink, INDEX), "is missing; set aside", 3),
    "index a folder": (each(make_folder, INDEX), "is a folder; set aside", 3),
    "manifest empty": (each(empty, MANIFEST), NOT_WRITTEN, 3),
    "manifest with a flipped bit": (each(flip(0.9), MANIFEST), NOT_WRITTEN, 3),
    "manifest removed": (each(os.unlink, MANIFEST), "is missing; set aside", 3),
    "manifest of another step": (each(edit(step=9999), MANIFEST), RENAMED, 3),
    "manifest of another version": (
        each(edit(step="4"), MANIFEST),
        r"has another version \(its step is '4'\)",
        None,
    ),
    "renamed": (move(4, 500, *ENDS), RENAMED, 3),
    "an older one copied": (move(3, 500, *ENDS, do=shutil.copy), RENAMED, 4),
    "two exchanged": (exchange(*ENDS), RENAMED, 2),
    "data of two exchanged": (exchange(DATA), "set aside as damaged-ckpt-3", 2),
    "manifests of two exchanged": (exchange(MANIFEST), RENAMED, 2),
    "the newest removed": (each(os.unlink, *ENDS), "", 3),
    "the list removed": (lambda folder: (folder / "checkpoint").unlink(), "", 4),
    "one left unfinished": (leave_unfinished, "", 4),
    "all of them": (each_step(cut), ALL, None),
    "all of them, by a flipped bit": (each_step(flip(0)), ALL, None),
}


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


@pytest.mark.parametrize(("harm", "told", "first"), DAMAGES.values(), ids=DAMAGES)
def test_a_damage_is_set_right_or_refused(begun, tmp_path, capsys, harm, told, first):
    before, expected = begun
    folder = tmp_path / "run"
    shutil.copytree(before, folder)
    harm(folder)
    capsys.readouterr()
    if first is None:
        for _ in range(2):
            with pytest.raises(CheckpointError, match=told) as caught:
                train(folder, STEPS)
            assert "\n" not in str(caught.value)
        return
    assert train(folder, STEPS) == (first, expected)
    err = capsys.readouterr().err
    assert re.search(told, err) if told else not err
    assert train(folder, STEPS) == (STEPS, expected), "what it has done counts from now on"
    assert not capsys.readouterr().err
