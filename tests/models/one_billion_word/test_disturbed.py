"""Full disks, closed streams and kills, with the whole program."""

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import time

import pytest

from pipemesh.checkpoint import newest, newest_whole
from tests.models.one_billion_word.disturbed import (
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
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    begun,
    weights,
)

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


def last_step(logdir):
    """The step of the newest checkpoint; 0 if there is none."""
    found = newest(str(logdir))
    return int(found.rpartition("-")[2]) if found else 0


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
        pytest.param(make_read_only, READ_ONLY, id="read-only", marks=pytest.mark.exhaustive),
        pytest.param(make_closed, DENIED, id="closed", marks=pytest.mark.exhaustive),
    ],
)
def test_what_cannot_be_written_to_for_a_while_ends_no_training(
    mount, size, many_losses, tmp_path, disturb, reason
):
    """To say what is kept, where nothing could be listed, once ended it."""
    logdir, err = tmp_path / "run", tmp_path / "err"
    if disturb is make_full:
        mount(logdir, "-t", "tmpfs", "-o", f"size={6 * size}", "disk")
    logdir.mkdir(exist_ok=True)
    options = unprivileged() if disturb is make_closed else {}

    with running(logdir, err, "--max_to_keep=2", **options) as process:
        wait_until(lambda: last_step(logdir) >= 2, process)
        mend = disturb(logdir, mount)
        wait_until(lambda: " cannot be written (" in err.read_text(), process)
        wait_until(lambda: "; training goes on, and " in err.read_text(), process)
        mend()
        before = last_step(logdir)
        wait_until(lambda: last_step(logdir) > before, process)
        process.send_signal(signal.SIGTERM)
        code, out, _ = finish(process)
    assert code == 128 + signal.SIGTERM, err.read_text()
    lines = [line for line in told(err.read_text()) if "ckpt-" in line]
    assert reason in lines[0], lines
    kept = re.fullmatch(rf".*; training goes on, and {logdir}/ckpt-(\d+) is kept", lines[0])
    assert kept and int(kept[1]) >= 2, "what is kept is known"
    reached = last_step(logdir)
    assert f"SIGTERM: saved {logdir}/ckpt-{reached}; run the same command again" in out
    assert reached + 3 <= max(many_losses), "it came too far to be compared"
    # Whole: it goes on from it.
    code, out, told_now = finish(begin(logdir, steps=reached + 3))
    assert code == 0, told_now
    assert f"going on from {logdir}/ckpt-{reached}\n" in out
    assert_same_losses(logdir, many_losses)
    assert max(losses(logdir)) == reached + 3


@pytest.mark.slow
def test_a_log_directory_without_permission_is_refused_and_left_alone(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    for mode, why in (
        (0o500, f"--logdir='{logdir}' cannot be written to ({DENIED}); give another"),
        (0o000, f"[Errno 13] {DENIED}: '{logdir}'"),
    ):
        logdir.chmod(mode)
        assert refused(logdir, **unprivileged() | {"cold": True}) == why
        logdir.chmod(0o700)
        assert_kept(logdir, 3, undisturbed)


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


CLOSED = 'exec "$@" <&- >&- 2>&-'


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_all_three_streams_closed_from_the_beginning(undisturbed, tmp_path):
    logdir = tmp_path / "run"
    closed = ["sh", "-c", CLOSED, "sh"]
    assert finish(begin(logdir, steps=3, cold=True, wrap=closed)) == (0, "", "")
    assert_kept(logdir, 3, undisturbed)
    assert finish(begin(logdir, "--steps=x", cold=True, wrap=closed)) == (2, "", "")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_killed_training_loses_no_checkpoint_and_no_loss(many_losses, tmp_path, kills):
    rng, logdir, reached = random.Random(kills), tmp_path / "run", 0
    logdir.mkdir()
    for _ in range(kills):
        with running(logdir, tmp_path / "err") as process:
            wait_until(lambda before=reached: last_step(logdir) > before, process)
            time.sleep(rng.uniform(0, 0.3))
        before, reached = reached, last_step(logdir)
        assert reached > before, "a checkpoint is lost"
        whole = newest_whole(str(logdir))
        assert whole is not None and whole[0] == str(logdir / f"ckpt-{reached}"), "it is not whole"
    assert reached + 3 <= max(many_losses), "it came too far to be compared"
    code, _, err = finish(begin(logdir, steps=reached + 3))
    assert code == 0, err
    assert not list(logdir.glob("damaged-*"))
    assert_same_losses(logdir, many_losses)
