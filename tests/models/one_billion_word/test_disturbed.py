"""Full disks, closed streams and kills, with the whole program."""

import contextlib
import os
import pathlib
import random
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from pipemesh.checkpoint import newest, newest_whole
from tests.models.one_billion_word.program import SMALL, SMALLER, finish
from tests.models.one_billion_word.small_training import (
    assert_same_weights,
    begun,
    summaries,
    weights,
)
from tests.warm import warm

# Steps of the undisturbed training, each of which is saved.
STEPS = 12
# Writes the number of its process into a file: a forked one is not the child of the test.
NUMBER = "import os, pathlib; pathlib.Path('number').write_text(str(os.getpid()))"
# With one block on one device.
SMALLEST = SMALLER.replace("NUM_LAYERS = 2", "NUM_LAYERS = 1")
FLAGS = [*SMALL, "--mesh_shape=layers:1", "--save_every=1", "--max_to_keep=1000"]
# Until something happens that is waited for, on a busy machine.
SECONDS = 100


def begin(logdir, *flags, steps=STEPS, cold=False, wrap=(), say=False, **streams):
    """Starts it: forked from what is loaded already, or cold, as an argument of `wrap`."""
    code = NUMBER + SMALLEST if say else SMALLEST
    command = [sys.executable, "-c", code] if cold else warm("-c", code)
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.Popen(
        [*wrap, *command, *FLAGS, f"--logdir={logdir}", f"--steps={steps}", *flags],
        env=environment,
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams,
    )


def told(text):
    """The lines that a program wrote, without those of its progress."""
    lines = (line.rpartition("\r")[2].strip() for line in text.splitlines())
    return [line for line in lines if line and not re.search(r", \d+ s$|^step [\d,]+ of ", line)]


@contextlib.contextmanager
def running(logdir, err, *flags, **options):
    """A training without end, whose standard error goes into a file; it ends with the block."""
    with open(err, "w") as file:
        process = begin(logdir, *flags, steps=100_000, stderr=file, **options)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def wait_until(condition, process):
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "it never happened"
        time.sleep(0.02)


def losses(logdir):
    """All values of the loss at each step, from all lives."""
    found = {}
    for tag, step, value in summaries(logdir, killed=True):
        if tag == "loss":
            found.setdefault(step, set()).add(value)
    return found


def last_step(logdir):
    """The step of the newest checkpoint; 0 if there is none."""
    found = newest(str(logdir))
    return int(found.rpartition("-")[2]) if found else 0


def assert_kept(logdir, step, undisturbed):
    """The newest is that of a step, and whole: all is read, which checks it."""
    found = newest_whole(str(logdir))
    assert found is not None and found[0] == str(logdir / f"ckpt-{step}")
    assert_same_weights(weights(logdir, step), weights(undisturbed, step))
    assert not [p.name for p in logdir.glob("*") if "_temp" in p.name], "half a checkpoint"


def assert_goes_on(logdir, step, other, steps):
    """The losses of all lives are those of another training of at least as many steps."""
    code, out, err = finish(begin(logdir, steps=steps))
    assert code == 0, err
    assert f"going on from {logdir}/ckpt-{step}\n" in out
    # A life that was killed may have gone beyond what it had saved.
    found = {step: values for step, values in losses(logdir).items() if step <= steps}
    expected = losses(other)
    assert max(found) == steps
    assert found == {step: expected[step] for step in found}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The log directory of a training that nobody disturbs, with the checkpoint of each step."""
    logdir = tmp_path_factory.mktemp("undisturbed")
    code, _, err = finish(begin(logdir))
    assert code == 0, err
    return logdir


@pytest.fixture
def mount():
    """Mounts something, for which one has to be the super user, until the test has ended."""
    mounted = []
    if not shutil.which("mount"):
        pytest.skip("nothing can be mounted here: there is no program `mount`")

    def mount(path, *arguments):
        path.mkdir(exist_ok=True)
        ran = subprocess.run(["mount", *arguments, str(path)], capture_output=True, text=True)
        told = ran.stderr.strip()
        if ran.returncode and (os.getuid() or "permission denied" in told):
            pytest.skip(f"nothing can be mounted here ({told}); be the super user")
        assert not ran.returncode, told
        if not arguments[-1].startswith("remount"):
            mounted.append(path)

    yield mount
    for path in reversed(mounted):
        # Lazily: a process that hangs may hold it.
        subprocess.run(["umount", "--lazy", str(path)], check=True)


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
    mount, size, undisturbed, tmp_path, disturb, reason
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
    found = newest_whole(str(logdir))
    assert found is not None and found[1].step == reached
    known, values = losses(undisturbed), losses(logdir)
    assert all(values[step] == known[step] for step in values.keys() & known.keys())


@pytest.mark.slow
def test_a_log_directory_without_permission_is_refused_and_left_alone(undisturbed, tmp_path):
    logdir = begun(undisturbed, 3, tmp_path / "run")
    for mode, why in (
        (0o500, f"--logdir='{logdir}' cannot be written to ({DENIED}); give another"),
        (0o000, f"[Errno 13] {DENIED}: '{logdir}'"),
    ):
        logdir.chmod(mode)
        code, _, err = finish(begin(logdir, **unprivileged() | {"cold": True}))
        assert (code, told(err)) == (2, [f"error: {why}"])
        logdir.chmod(0o700)
        assert_kept(logdir, 3, undisturbed)


@pytest.mark.slow
def test_a_save_that_hangs_is_left_by_the_second_signal(undisturbed, tmp_path):
    logdir, err = tmp_path / "run", tmp_path / "err"
    with running(logdir, err, say=True) as process:
        wait_until((logdir / "vocabulary").exists, process)
        # Who opens a pipe waits for somebody who reads it.
        (logdir / "ckpt-3_temp").mkdir()
        number = pathlib.Path("number").read_text()
        os.mkfifo(logdir / "ckpt-3_temp" / f".ckpt-3.manifest.{number}")
        wait_until((logdir / "ckpt-3_temp" / "ckpt-3.index").exists, process)
        process.send_signal(signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        process.send_signal(signal.SIGTERM)
        code, _, _ = finish(process)
    assert code == 130, err.read_text()
    assert "Traceback" not in err.read_text()
    assert_goes_on(logdir, 2, undisturbed, STEPS)
    assert_kept(logdir, STEPS, undisturbed)
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
@pytest.mark.parametrize("kills", [1, pytest.param(20, marks=pytest.mark.exhaustive)])
def test_a_killed_training_loses_no_checkpoint_and_no_loss(undisturbed, tmp_path, kills):
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
    steps, other = reached + 3, undisturbed
    if steps > STEPS:
        other = tmp_path / "other"
        assert finish(begin(other, "--save_every=1000", steps=steps))[0] == 0
    assert_goes_on(logdir, reached, other, steps)
    assert not list(logdir.glob("damaged-*"))
