"""`pipemesh checkpoint`: inspect, diff, convert."""

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.checkpoint import Checkpoints
from pipemesh.commands.main import main


@pytest.fixture
def saved(tmp_path):
    """Two checkpoints of a model with an optimizer and a place in data."""
    state = {
        "global_step": tf.Variable(0, dtype=tf.int64),
        "lm/d0/cell_000/w/var": tf.Variable([[1.0, 2.0], [3.0, 4.0]]),
        "lm/d0/cell_000/w/var/Adam": tf.Variable(tf.zeros([2, 2])),
        "lm/b/var": tf.Variable([0.5]),
        "beta1_power": tf.Variable(0.9),
        "data/batches": iter(tf.data.Dataset.range(9)),
    }
    saver = Checkpoints(str(tmp_path / "run"), state)
    (tmp_path / "run").mkdir()
    first = saver.save(
        3,
        {
            "plan": {"mesh": "layers:2", "layout": "", "allow_idle": "false"},
            "flags": {"steps": 3, "seed": 7},
            "settings": {f"task.{number}": "none" for number in range(600)},
            "data": {"train": "abc", "heldout": ""},
            "vocabulary": "x" * 99,
            "skip": 0,
            "judged": 0,
            "best": [None, 0],
            "evaluated_by": "models.lm",
        },
    )
    state["global_step"].assign(4)
    state["lm/d0/cell_000/w/var"].assign_add([[0.0, 0.0], [0.0, 3.0]])
    return first, saver.save(4, {}, score=2.5)


def said(capsys, *arguments, code=0):
    assert main(["checkpoint", *arguments]) == code
    found = capsys.readouterr()
    return found.err if code == 2 else found.out


def test_inspect(saved, capsys):
    lines = said(capsys, "inspect", saved[0]).splitlines()
    assert lines[:7] == [
        f"{saved[0]}: step 3",
        "plan: mesh=layers:2",
        "flags: --steps=3 --seed=7",
        f"settings: 600 values, in {saved[0]}.manifest",
        "data: train abc, heldout none",
        "vocabulary: (99 characters)",
        "name                       shape   dtype    bytes",
    ]
    assert "lm/d0/cell_000/w/var       2x2     float32     16" in lines
    assert "global_step                scalar  int64        8" in lines
    assert lines[-1] == "6 tensors, 11 numbers, 48 B"
    # The newest of a folder; a part of the names; all of it read.
    folder = saved[0].rpartition("/")[0]
    lines = said(capsys, "inspect", folder, "--match=^lm/b", "--verify").splitlines()
    assert lines[:2] == [f"{saved[1]}: step 4", "score: 2.5"]
    assert lines[-2:] == ["1 tensors, 1 numbers, 4 B", "all 6 tensors are intact"]
    # Damaged files are named.
    with open(f"{saved[0]}.data-00000-of-00001", "r+b") as file:
        file.write(b"\xff")
    assert main(["checkpoint", "inspect", f"{saved[0]}.index"]) == 0
    capsys.readouterr()
    told = said(capsys, "inspect", saved[0], "--verify", code=2)
    assert f"error: {saved[0]} is damaged: {saved[0]}.data-00000-* cannot be read" in told
    assert told.endswith(
        "; use another checkpoint of its folder, or put a whole copy of its files there\n"
    )


def test_diff(saved, capsys):
    lines = said(capsys, "diff", *saved, code=1).splitlines()
    assert lines[1].split() == ["global_step", "1", "0.333"] or lines[1].split()[0] == "global_step"
    assert lines[2].split() == ["lm/d0/cell_000/w/var", "3", f"{3 / np.sqrt(30):.3g}"]
    assert lines[-1] == "2 of 6 tensors differ"
    assert said(capsys, "diff", *saved, "--match=lm/b") == "the same: 1 tensors\n"


def test_convert_takes_weights_along_under_other_names(saved, tmp_path, capsys):
    to = str(tmp_path / "other" / "ckpt")
    told = said(
        capsys, "convert", saved[1], to, "--dtype=bfloat16", "--weights-only", "--rename=/d\\d+/=/"
    )
    assert told == f"{to}: 3 tensors of {saved[1]}\n"
    reader = tf.train.load_checkpoint(to)
    dtypes = {n: d.name for n, d in reader.get_variable_to_dtype_map().items()}
    assert dtypes == {
        "global_step": "int64",
        "lm/cell_000/w/var": "bfloat16",
        "lm/b/var": "bfloat16",
    }
    lines = said(capsys, "diff", saved[1], to, code=1).splitlines()
    assert lines[-1] == "5 of 7 tensors differ"
    assert f"only in {to}" in "".join(lines)
    assert "exists; give another path" in said(capsys, "convert", saved[1], to, code=2)


def test_convert_adds_and_removes_stages_in_names(saved, tmp_path, capsys):
    theirs, back = str(tmp_path / "theirs" / "ckpt-00000004"), str(tmp_path / "back" / "ckpt-4")
    told = said(capsys, "convert", saved[1], theirs, "--stages=0,0,3")
    assert told == f"{theirs}: 5 tensors of {saved[1]}\n", "without the place in data"
    assert "lm/d1/cell_000/w/var/Adam" in said(capsys, "inspect", theirs)
    again = f"{tmp_path}/again"
    told = said(capsys, "convert", saved[0], again, "--stages=like", f"--like={theirs}")
    assert told == f"{again}: 5 tensors of {saved[0]}\n"
    # A folder stands for its newest checkpoint, whatever zeros lingvo writes.
    folder = str(tmp_path / "theirs")
    rename = "--rename=lm/d0=lm"
    like = str(tmp_path / "like")
    said(capsys, "convert", saved[0], like, rename)
    told = said(capsys, "convert", folder, back, "--stages=none", f"--like={like}")
    assert told == f"{back}: 5 tensors of {theirs}, data/batches of {like}\n"
    lines = said(capsys, "inspect", back).splitlines()
    assert lines[0] == f"{back}: step 4"
    assert "lm/cell_000/w/var" in "".join(lines)
    said(capsys, "convert", saved[1], f"{back}-renamed", rename)
    assert said(capsys, "diff", back, f"{back}-renamed") == "the same: 6 tensors\n"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["inspect", "{folder}/nothing"], "nothing' is no checkpoint: there is no"),
        (["inspect", "{folder}"], "has no checkpoint (ckpt-<step>.index)"),
        (["inspect", "{saved}", "--match=zzz"], "has no tensor of such a name; it has 6, such as"),
        (["inspect", "{saved}", "--match=("], "--match='(' is no regular expression"),
        (["convert", "{saved}", "{folder}/to", "--rename=x"], "--rename='x' has no '='"),
        (
            ["convert", "{saved}", "{folder}/to", "--stages=two"],
            "'two' is neither 'none' nor 'like' nor boundaries",
        ),
        (["convert", "{saved}", "{folder}/to", "--stages=like"], "--stages=like needs --like"),
        (["convert", "{saved}", "{folder}/to", "--stages=1,2"], "stages=[1, 2] are no boundaries"),
        (["convert", "{saved}", "{folder}/to", "--like={folder}/no"], "no' is no checkpoint"),
        (["convert", "{saved}", "{folder}/to", "--rename=^.*$=w"], "would both be 'w'; rename one"),
    ],
)
def test_bad_input_is_one_line(saved, tmp_path, capsys, arguments, told):
    given = [a.format(folder=tmp_path, saved=saved[0]) for a in arguments]
    error = said(capsys, *given, code=2)
    assert told in error and error.count("\n") == 1
