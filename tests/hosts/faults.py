"""Trainings on workers to which something happens."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import tensorflow as tf

from tests.models.one_billion_word.program import SMALLER
from tests.warm import warm

LAUNCH = [sys.executable, "-m", "pipemesh", "launch"]
# Small enough for a step to take a fraction of a second.
FLAGS = [
    *("--mesh_shape=layers:2", "--num_microbatches=2", "--batch_size=8", "--sequence_length=32"),
    *("--eval_every=1000", "--log_format=json", "--dropout_prob=0.1", "--worker_answer=3"),
    *("--eval_batches=2", "--vocab_size=400"),
]
STEPS = 24


def children(pid):
    """The workers that a process has started, in their order."""
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    found = {}
    for child in map(int, text.split()):
        with contextlib.suppress(OSError):
            words = pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
            if b"worker" in words.split(b"\0"):
                # Not by their numbers, which begin again at some time.
                stat = pathlib.Path(f"/proc/{child}/stat").read_text(encoding="utf-8")
                found[child] = int(stat.rpartition(")")[2].split()[19]), child
    return sorted(found, key=found.__getitem__)


def until(is_so, seconds, said=str):
    """Waits; an error has the text that `said` returns."""
    limit = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < limit, f"not within {seconds} s: {said()}"
        time.sleep(0.05)


class Training:
    """A training on workers; its output is in files, so it waits for no reader."""

    def __init__(self, logdir, process, out, err):
        self.logdir, self.process, self._out, self._err = logdir, process, out, err

    def events(self, kind):
        lines = self._out.read_text(encoding="utf-8").splitlines()
        found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
        return [event for event in found if event["event"] == kind]

    @property
    def err(self):
        return self._err.read_text(encoding="utf-8")

    def workers(self):
        """The processes of those that a launcher has started."""
        return children(self.process.pid)

    def _until(self, is_so, seconds):
        def is_so_or_ended():
            assert self.process.poll() is None, self.err[-3000:]
            return is_so()

        until(is_so_or_ended, seconds, lambda: self.err[-6000:])

    def until_step(self, step, times=1, seconds=150):
        """Waits until a step was finished for so many times."""
        self._until(
            lambda: sum(event["step"] == step for event in self.events("step")) >= times, seconds
        )

    def until_steps(self, number, seconds=150):
        """Waits until so many steps were finished, those counted that were lost again."""
        self._until(lambda: len(self.events("step")) >= number, seconds)

    def until_told(self, text, times=1, seconds=60):
        self._until(lambda: self.err.count(text) >= times, seconds)

    def until_done(self, seconds=200):
        """Waits until it has ended well; returns its errors."""
        assert self.process.wait(seconds) == 0, self.err[-3000:]
        return self.err

    def checkpoint(self):
        """The step of the newest checkpoint; 0 if there is none."""
        found = [int(p.stem.partition("-")[2]) for p in self.logdir.glob("ckpt-*.index")]
        return max(found, default=0)


@contextlib.contextmanager
def training(logdir, *words, launch=("--processes=2",), command=None, steps=STEPS, save_every=8):
    """A training on two workers of a launcher, or by a command of its own."""
    command = command or [*LAUNCH, *launch, "--", *warm("-c", SMALLER)]
    out, err = (logdir.parent / f"{logdir.name}.{name}" for name in ("out", "err"))
    flags = [*FLAGS, f"--steps={steps}", f"--save_every={save_every}", f"--logdir={logdir}"]
    with open(out, "wb") as to_out, open(err, "wb") as to_err:
        process = subprocess.Popen([*command, *flags, *words], stdout=to_out, stderr=to_err)
    try:
        yield Training(logdir, process, out, err)
    finally:
        if process.poll() is None:
            # A launcher ends its workers.
            process.send_signal(signal.SIGKILL)
        process.wait()


def weights(logdir, steps=STEPS):
    """All that the checkpoint of the last step has of a model and its optimizer."""
    reader = tf.train.load_checkpoint(os.path.join(logdir, f"ckpt-{steps}"))
    names = [name for name in reader.get_variable_to_shape_map() if "data" not in name]
    return {name: reader.get_tensor(name) for name in names if not name.startswith("_")}


def assert_same(found, wanted):
    assert len(wanted) > 50
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert (found[name] == value).all(), name
