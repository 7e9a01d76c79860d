"""Checkpoints that are damaged in every way: each is named and set aside, the one before serves."""

import os
import shutil

import pytest

from tests.models.one_billion_word.disturbed import (
    STEPS,
    assert_goes_on,
    assert_kept,
    begin,
    refused,
)
from tests.models.one_billion_word.program import finish
from tests.models.one_billion_word.small_training import begun

pytestmark = pytest.mark.slow

DATA, INDEX, MANIFEST = ".data-00000-of-00001", ".index", ".manifest"


def cut(path):
    os.truncate(path, path.stat().st_size * 2 // 3)


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def lose(path):
    path.unlink()


def put_a_folder(path):
    path.unlink()
    (path / "inside").mkdir(parents=True)


def write_noise(path):
    path.write_bytes(os.urandom(999))


def empty(path):
    path.write_bytes(b"")


# What is found when a tensor is read comes last: until then nobody reads any.
HARMS = [
    (INDEX, lose, "is missing"),
    (DATA, cut, "bytes of "),
    (DATA, lose, "is missing"),
    (DATA, put_a_folder, "is a folder"),
    (MANIFEST, cut, "has changed since it was written"),
    (MANIFEST, write_noise, "has changed since it was written"),
    (MANIFEST, empty, "has changed since it was written"),
    (MANIFEST, lose, "is missing"),
    (MANIFEST, put_a_folder, "is a folder"),
    (INDEX, cut, "has changed since it was written"),
    (DATA, flip, "cannot be read ("),
]


def files(logdir, step, prefix=""):
    """What there is of a checkpoint, by the ends of names."""
    name = f"{prefix}ckpt-{step}"
    paths = [path for path in logdir.glob(f"{name}.*") if path.is_file()]
    return {path.name.removeprefix(name): path.read_bytes() for path in paths}


def test_all_that_are_damaged_are_named_and_set_aside_and_the_last_whole_one_serves(
    undisturbed, tmp_path
):
    logdir = tmp_path / "run"
    shutil.copytree(undisturbed, logdir)
    steps = range(STEPS, STEPS - len(HARMS), -1)
    for step, (end, harm, _) in zip(steps, HARMS, strict=True):
        harm(logdir / f"ckpt-{step}{end}")
    left = {step: files(logdir, step) for step in steps}
    last = steps[-1] - 1
    err = assert_goes_on(logdir, last, undisturbed)
    for step, (end, _, what) in zip(steps, HARMS, strict=True):
        (line,) = [line for line in err.splitlines() if f"/ckpt-{step} is damaged: " in line]
        named = f"{logdir}/ckpt-{step}{end}"
        # TensorFlow says of which of the files for tensors it is.
        named = named if what != "cannot be read (" else f"{named[: -len('of-00001')]}*"
        assert f" is damaged: {named} " in line and what in line
        assert f"; set aside as damaged-ckpt-{step}, going back to {logdir}/ckpt-" in line
        assert files(logdir, step, "damaged-") == left[step], "nothing of it is lost"


@pytest.mark.parametrize(
    ("end", "harm"),
    [
        (INDEX, lose),
        (DATA, flip),
        pytest.param(DATA, cut, marks=pytest.mark.exhaustive),
        pytest.param(MANIFEST, write_noise, marks=pytest.mark.exhaustive),
    ],
)
def test_where_none_is_whole_nobody_begins_anew_until_a_copy_is_put_there(
    undisturbed, tmp_path, end, harm
):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    harm(logdir / f"ckpt-3{end}")
    for _ in range(2):
        code, _, err = finish(begin(logdir))
        assert code == 2
        assert err.splitlines()[-1] == (
            f"error: {logdir} has no whole checkpoint, only damaged ones (damaged-ckpt-3); put "
            "a copy of one there, remove damaged-* to begin anew, or give another folder"
        )
    for path in undisturbed.glob("ckpt-3.*"):
        shutil.copy2(path, logdir)
    assert_goes_on(logdir, 3, undisturbed)


def test_what_cannot_be_read_now_is_neither_damaged_nor_passed_over(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    begun(undisturbed, 2, tmp_path / "older")
    for path in (tmp_path / "older").glob("ckpt-2.*"):
        shutil.copy2(path, logdir)
    for end in (DATA, INDEX, MANIFEST):
        path = logdir / f"ckpt-3{end}"
        path.rename(tmp_path / "kept")
        path.symlink_to(path.name)
        why = "Too many levels of symbolic links"
        assert refused(logdir, cold=True).startswith(f"{path} cannot be read ({why})")
        (tmp_path / "kept").replace(path)
    assert_kept(logdir, 3, undisturbed)
    assert not list(logdir.glob("damaged-*"))


def test_a_log_directory_of_another_program_is_refused_and_left_alone(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    (logdir / f"ckpt-3{MANIFEST}").unlink()
    before = files(logdir, 3)
    line = refused(logdir, cold=True)
    assert line.startswith(f"{logdir}/ckpt-3 is a checkpoint of another program, or lost ")
    assert files(logdir, 3) == before
