"""Disks that are full, read-only or closed: before a training, while it runs, while it saves."""

import contextlib
import os
import re
import shutil
import signal
import subprocess

import pytest

from pipemesh.checkpoint import newest
from tests.models.one_billion_word.disturbed import (
    STEPS,
    assert_goes_on,
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
from tests.models.one_billion_word.small_training import assert_same_weights, begun, weights

FULL = "No space left on device"
READ_ONLY = "Read-only file system"
DENIED = "Permission denied"
MIB = 1 << 20
# What the system lets the super user do whatever the permissions of a file.
_RIGHTS = "-dac_override,-dac_read_search"


def fill(path):
    """Writes a file until nothing goes any more."""
    with open(path, "wb", buffering=0) as file:
        for block in (MIB, 4096):
            with contextlib.suppress(OSError):
                while file.write(bytes(block)) == block:
                    continue


@pytest.fixture(scope="module")
def size(undisturbed):
    """Bytes of a checkpoint."""
    return sum(path.stat().st_size for path in undisturbed.glob("ckpt-1.*"))


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_no_training_and_with_more_room_it_goes_on(
    disk, undisturbed, size, tmp_path
):
    logdir = disk(tmp_path / "run", 2 * size + size // 2 + MIB)
    code, _, err = finish(begin(logdir))
    assert code == 2
    first, *_, last = [line for line in told(err) if "ckpt-" in line]
    assert first.startswith(f"{logdir}/ckpt-3 cannot be written (") and FULL in first
    assert first.endswith(f"; training goes on, and {logdir}/ckpt-2 is kept")
    assert last.startswith(f"error: {logdir}/ckpt-{STEPS} cannot be written (") and FULL in last
    assert last.endswith(f"; of the checkpoints before, {logdir}/ckpt-2 is kept")
    assert_kept(logdir, 2, undisturbed)

    # Before the first step nobody goes on.
    fill(logdir / "filler")
    assert refused(logdir) == f"[Errno 28] {FULL}: '{logdir}/config.toml'"
    assert_kept(logdir, 2, undisturbed)

    (logdir / "filler").unlink()
    disk(logdir, (STEPS + 1) * size + 9 * MIB)
    assert_goes_on(logdir, 2, undisturbed)


@pytest.mark.slow
def test_a_signal_on_a_full_disk_ends_it_with_what_was_saved(disk, undisturbed, size, tmp_path):
    logdir = disk(tmp_path / "run", size + size // 2 + MIB)
    err = tmp_path / "err"
    with running(logdir, err) as process:
        wait_until(lambda: "cannot be written" in err.read_text(), process)
        process.send_signal(signal.SIGTERM)
        code, _, _ = finish(process)
    last = told(err.read_text())[-1]
    assert code == 2
    assert last.startswith(f"error: {logdir}/ckpt-") and FULL in last
    assert_kept(logdir, 1, undisturbed)
    disk(logdir, (STEPS + 1) * size + 9 * MIB)
    assert_goes_on(logdir, 1, undisturbed)


@pytest.mark.slow
def test_a_vocabulary_that_finds_no_room_is_told_in_a_line(disk, undisturbed, size, tmp_path):
    logdir = disk(tmp_path / "run", 4 * size)
    fill(logdir / "filler")
    line = refused(logdir, cold=True)
    assert line.startswith(f"the vocabulary cannot be written to '{logdir}/vocabulary/vocab-400-")
    assert line.endswith(f".model' ({FULL}); make room, or give another folder")
    assert not list((logdir / "vocabulary").iterdir())
    (logdir / "filler").unlink()
    assert finish(begin(logdir, steps=2))[0] == 0
    assert_kept(logdir, 2, undisturbed)


@pytest.fixture(scope="module")
def many_losses(tmp_path_factory):
    """The losses of a training that goes further than one that is disturbed is to come."""
    logdir = tmp_path_factory.mktemp("many")
    code, _, err = finish(begin(logdir, "--save_every=1000", steps=300))
    assert code == 0, err
    return losses(logdir)


def make_full(logdir, mount):
    fill(logdir / "filler")
    return (logdir / "filler").unlink


def make_read_only(logdir, mount):
    # Elsewhere, then over itself: a file that is being written to keeps a disk from becoming
    # read-only, and in between a training would open one.
    aside = logdir.with_name("aside")
    mount(aside, "--bind", str(logdir))
    mount(aside, "-o", "remount,bind,ro")
    mount(logdir, "--bind", str(aside))
    return lambda: mount(logdir, "-o", "remount,bind,rw")


def make_closed(logdir, mount):
    logdir.chmod(0)
    return lambda: logdir.chmod(0o700)


def unprivileged():
    """Options of a program that permissions of files bind."""
    if os.getuid():
        return {}
    if not shutil.which("setpriv"):
        pytest.skip("the super user may read and write all, and there is no program `setpriv`")
    rights = [f"--bounding-set={_RIGHTS}", f"--inh-caps={_RIGHTS}"]
    # Who was forked from a program that has rights has them as well.
    return {"cold": True, "wrap": ["setpriv", *rights]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("disturb", "reason"),
    [
        pytest.param(make_full, FULL, id="full"),
        pytest.param(make_read_only, READ_ONLY, id="read-only"),
        pytest.param(make_closed, DENIED, id="closed", marks=pytest.mark.exhaustive),
    ],
)
def test_what_cannot_be_written_to_for_a_while_ends_no_training(
    mount, disk, size, many_losses, tmp_path, disturb, reason
):
    """To say what is kept, where nothing could be listed, once ended it."""
    logdir, err = tmp_path / "run", tmp_path / "err"
    if disturb is make_full:
        disk(logdir, 6 * size)
    logdir.mkdir(exist_ok=True)
    options = unprivileged() if disturb is make_closed else {}

    def last():
        found = newest(str(logdir))
        return int(found.rpartition("-")[2]) if found else 0

    with running(logdir, err, "--max_to_keep=2", **options) as process:
        wait_until(lambda: last() >= 2, process)
        mend = disturb(logdir, mount)
        wait_until(lambda: " cannot be written (" in err.read_text(), process)
        wait_until(lambda: "; training goes on, and " in err.read_text(), process)
        mend()
        before = last()
        wait_until(lambda: last() > before, process)
        process.send_signal(signal.SIGTERM)
        code, out, _ = finish(process)
    assert code == 128 + signal.SIGTERM, err.read_text()
    lines = [line for line in told(err.read_text()) if "ckpt-" in line]
    assert reason in lines[0], lines
    kept = re.fullmatch(rf".*; training goes on, and {logdir}/ckpt-(\d+) is kept", lines[0])
    assert kept and int(kept[1]) >= 2, "what is kept is known"
    reached = last()
    assert f"SIGTERM: saved {logdir}/ckpt-{reached}; run the same command again" in out
    assert reached + 3 <= max(many_losses), "it came too far to be compared"
    # Whole: it goes on from it.
    code, out, told_now = finish(begin(logdir, steps=reached + 3))
    assert code == 0, told_now
    assert f"going on from {logdir}/ckpt-{reached}\n" in out
    assert_same_losses(logdir, many_losses)
    assert max(losses(logdir)) == reached + 3


@pytest.mark.slow
def test_what_is_only_reported_may_fail_to_be_written(undisturbed, tmp_path):
    logdir = tmp_path / "run"
    logdir.mkdir()
    (logdir / "layout.txt").symlink_to("/dev/full")
    (logdir / "train").write_text("a file stands in its place")
    code, out, err = finish(begin(logdir, steps=3))
    assert code == 0, err
    assert f"the layout of the weights cannot be written ([Errno 28] {FULL})\n" in out
    assert err.count("summaries of step 1 cannot be written (") == 1
    assert err.count("cannot be written") == 1, "once for all steps"
    assert_kept(logdir, 3, undisturbed)
    (logdir / "layout.txt").unlink()
    (logdir / "train").unlink()
    assert_goes_on(logdir, 3, undisturbed)
    assert "stack.d0.cell_000.table " in (logdir / "layout.txt").read_text()


@pytest.mark.slow
def test_a_log_directory_that_is_none_is_refused_before_anything_is_done(tmp_path):
    (tmp_path / "file").write_text("of somebody else")
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    for name, why in (
        ("file", "is a file; give a folder"),
        ("link", "is a link to nothing; give a folder"),
        ("file/below", "cannot be written to (Not a directory); give another"),
    ):
        line = refused(tmp_path / name, cold=True)
        assert line == f"logdir='{tmp_path / name}' {why}"
    assert (tmp_path / "file").read_text() == "of somebody else"


@pytest.mark.slow
def test_a_log_directory_without_permission_is_refused_and_left_alone(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    for mode, why in (
        (0o500, f"logdir='{logdir}' cannot be written to ({DENIED}); give another"),
        (0o000, f"[Errno 13] {DENIED}: '{logdir}'"),
    ):
        logdir.chmod(mode)
        assert refused(logdir, **unprivileged() | {"cold": True}) == why
        logdir.chmod(0o700)
        assert_kept(logdir, 3, undisturbed)


@pytest.mark.slow
def test_checkpoints_on_a_disk_that_is_read_only_are_left_alone(mount, undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    make_writable = make_read_only(logdir, mount)
    for path in (logdir, logdir / "below"):
        line = refused(path, cold=True)
        assert line == f"logdir='{path}' cannot be written to ({READ_ONLY}); give another"
    assert_kept(logdir, 3, undisturbed)
    make_writable()
    assert_goes_on(logdir, 3, undisturbed)


@pytest.mark.slow
def test_a_save_that_hangs_is_left_by_the_second_signal(undisturbed, tmp_path):
    logdir, err = tmp_path / "run", tmp_path / "err"
    with running(logdir, err, cold=True) as process:
        wait_until((logdir / "vocabulary").exists, process)
        # Who opens a pipe waits for somebody who reads it.
        (logdir / "ckpt-3_temp").mkdir()
        os.mkfifo(logdir / "ckpt-3_temp" / f".ckpt-3.manifest.{process.pid}")
        wait_until((logdir / "ckpt-3_temp" / "ckpt-3.index").exists, process)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.send_signal(signal.SIGTERM)
        code, _, _ = finish(process)
    assert code == 130, err.read_text()
    assert "Traceback" not in err.read_text()
    assert_goes_on(logdir, 2, undisturbed)
    assert not list(logdir.glob("damaged-*"))
    assert_same_weights(weights(logdir, 2), weights(undisturbed, 2))
