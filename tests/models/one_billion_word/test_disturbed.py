"""Full disks, closed streams, kills and damaged checkpoints, with the whole program."""

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
from tests.models.one_billion_word.program import finish, run, start
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
def test_checkpoints_on_a_disk_that_is_read_only_are_left_alone(mount, undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    make_writable = make_read_only(logdir, mount)
    for path in (logdir, logdir / "below"):
        line = refused(path, cold=True)
        assert line == f"--logdir='{path}' cannot be written to ({READ_ONLY}); give another"
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


CLOSED = 'exec "$@" <&- >&- 2>&-'


@pytest.fixture
def full():
    with open("/dev/full", "w") as file:
        yield file


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_standard_output_on_a_full_disk_is_told_once_and_training_goes_on(
    full, undisturbed, tmp_path
):
    logdir = tmp_path / "run"
    code, _, err = finish(begin(logdir, steps=3, stdout=full))
    assert code == 0
    told = "standard output is closed (No space left on device); going on"
    assert err.count(told) == 1 and "Error" not in err
    assert_kept(logdir, 3, undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_both_streams_on_a_full_disk_and_no_input(full, undisturbed, tmp_path):
    logdir = tmp_path / "run"
    streams = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": full}
    assert finish(begin(logdir, steps=3, **streams))[0] == 0
    assert_kept(logdir, 3, undisturbed)
    # Nor is an error in the flags less of an error.
    assert finish(begin(logdir, "--steps=x", cold=True, **streams))[0] == 2


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_all_three_streams_closed_from_the_beginning(undisturbed, tmp_path):
    logdir = tmp_path / "run"
    closed = ["sh", "-c", CLOSED, "sh"]
    assert finish(begin(logdir, steps=3, cold=True, wrap=closed)) == (0, "", "")
    assert_kept(logdir, 3, undisturbed)
    assert finish(begin(logdir, "--steps=x", cold=True, wrap=closed)) == (2, "", "")


SPLIT = ["--mesh_shape=layers:2;data:2", "--layout=batch:data", "--save_every=1"]
NUM_STEPS = 60
# How long a life may be: it ends while the graph is built, or later, when something is being saved
# nearly all the time.
SHORTEST, LONGEST = 1.0, 22.0


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(20, marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_those_of_the_undisturbed_training_and_no_checkpoint_is_lost(tmp_path, kills):
    whole, logdir = tmp_path / "whole", tmp_path / "killed"
    logdir.mkdir()
    run(f"--logdir={whole}", f"--steps={NUM_STEPS}", *SPLIT)
    rng, reached = random.Random(kills), 0
    lengths = [rng.uniform(SHORTEST, LONGEST) for _ in range(kills)]
    for length in lengths:
        process = start(f"--logdir={logdir}", f"--steps={NUM_STEPS}", *SPLIT)
        if length == lengths[0]:
            # One life sees saving, however busy the machine is.
            wait_until(lambda: newest(str(logdir)), process)
        else:
            time.sleep(length)
        process.kill()
        process.communicate()
        found = newest(str(logdir))
        step = int(found.rpartition("-")[2]) if found else 0
        assert step >= reached, "a checkpoint is lost"
        reached = step
        if found:
            whole_one = newest_whole(str(logdir))
            assert whole_one is not None and whole_one[0] == found, "it is not whole"
    assert reached > 0, "no life was long enough to say anything"
    code, _, err = finish(start(f"--logdir={logdir}", f"--steps={NUM_STEPS}", *SPLIT))
    assert code == 0, err
    assert not list(logdir.glob("damaged-*"))
    expected, mine = losses(whole), losses(logdir)
    assert list(expected) == list(range(1, NUM_STEPS + 1))
    assert {step: values for step, values in mine.items() if len(values) > 1} == {}
    # Of a life that was killed the last summaries may not be written.
    assert len(mine) > NUM_STEPS / 2
    assert {step: expected[step] for step in mine} == mine


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
    """Returns the files of a checkpoint, by the ends of their names."""
    name = f"{prefix}ckpt-{step}"
    paths = [path for path in logdir.glob(f"{name}.*") if path.is_file()]
    return {path.name.removeprefix(name): path.read_bytes() for path in paths}


@pytest.mark.slow
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


@pytest.mark.slow
def test_where_none_is_whole_nobody_begins_anew_until_a_copy_is_put_there(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    flip(logdir / f"ckpt-3{DATA}")
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_log_directory_of_another_program_is_refused_and_left_alone(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    (logdir / f"ckpt-3{MANIFEST}").unlink()
    before = files(logdir, 3)
    line = refused(logdir, cold=True)
    assert line.startswith(f"{logdir}/ckpt-3 is a checkpoint of another program, or lost ")
    assert files(logdir, 3) == before
