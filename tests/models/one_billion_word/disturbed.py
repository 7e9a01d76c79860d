"""Trainings that are disturbed from outside, and compared with one that nobody disturbs."""

import contextlib
import os
import re
import subprocess
import sys
import time

from pipemesh.checkpoint import newest_whole
from tests.models.one_billion_word.program import SMALL, SMALLER, finish
from tests.models.one_billion_word.small_training import assert_same_weights, summaries, weights
from tests.warm import warm

# Steps of the undisturbed training, each of which is saved.
STEPS = 12
# With one block on one device.
SMALLEST = SMALLER.replace("NUM_LAYERS = 2", "NUM_LAYERS = 1")
FLAGS = [*SMALL, "--mesh_shape=layers:1", "--save_every=1", "--max_to_keep=1000"]
# Until something happens that is waited for, on a busy machine.
SECONDS = 100


def begin(logdir, *flags, steps=STEPS, cold=False, wrap=(), env=(), **streams):
    """Starts it: forked from what is loaded already, or cold, as an argument of `wrap`."""
    command = [sys.executable, "-c", SMALLEST] if cold else warm("-c", SMALLEST)
    environment = {k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"}
    return subprocess.Popen(
        [*wrap, *command, *FLAGS, f"--logdir={logdir}", f"--steps={steps}", *flags],
        env=environment | dict(env),
        text=True,
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams,
    )


def told(text):
    """The lines that a program wrote, without those of its progress."""
    lines = (line.rpartition("\r")[2].strip() for line in text.splitlines())
    return [line for line in lines if line and not re.search(r", \d+ s$|^step [\d,]+ of ", line)]


def refused(logdir, *flags, **options):
    """The one line that says why."""
    code, _, err = finish(begin(logdir, *flags, **options))
    assert code == 2, err
    (line,) = told(err)
    assert line.startswith("error: "), err
    return line.removeprefix("error: ")


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


def assert_kept(logdir, step, undisturbed):
    """The newest is that of a step, and whole: all is read, which checks it."""
    found = newest_whole(str(logdir))
    assert found is not None and found[0] == str(logdir / f"ckpt-{step}")
    assert_same_weights(weights(logdir, step), weights(undisturbed, step))
    assert not [p.name for p in logdir.glob("*") if "_temp" in p.name], "half a checkpoint"


def assert_goes_on(logdir, step, undisturbed, *flags, **options):
    """The same command goes on from a step, and computes what nobody disturbed.

    Returns:
        What it wrote to standard error.
    """
    code, out, err = finish(begin(logdir, *flags, **options))
    assert code == 0, err
    assert f"going on from {logdir}/ckpt-{step}\n" in out
    assert_kept(logdir, STEPS, undisturbed)
    assert_same_losses(logdir, losses(undisturbed))
    return err


def assert_same_losses(logdir, expected):
    """Those of all lives are the expected ones, as far as these go."""
    mine = {step: values for step, values in losses(logdir).items() if step <= max(expected)}
    assert mine, "nothing is known of it"
    assert mine == {step: expected[step] for step in mine}
