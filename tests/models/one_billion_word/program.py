"""The training program as users start it."""

import os
import pathlib
import re
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).parents[3]
# Small in what costs time: the graph grows with stages and microbatches.
SMALL = [
    "--vocab_size=400",
    "--sequence_length=32",
    "--batch_size=4",
    "--num_microbatches=2",
    "--eval_batches=2",
    "--save_every=3",
    "--eval_every=1000",
]


def start(*flags, code=None, stdout=subprocess.PIPE):
    """Starts it; `code` runs instead of the program's module, with `argv` for its arguments."""
    program = ["-m", "models.one_billion_word.train"] if code is None else ["-c", code]
    return subprocess.Popen(
        [sys.executable, *program, *SMALL, *flags],
        cwd=ROOT,
        # As from a shell, not with the log level of the tests.
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process):
    """The process's exit code, and what it wrote to stdout and stderr."""
    try:
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def run(*flags, code=None):
    """What it prints when all goes well."""
    status, out, err = finish(start(*flags, code=code))
    assert status == 0, err
    return out


def refused(*flags):
    """The one line that says why."""
    code, _, err = finish(start(*flags))
    assert code == 2, err
    # On a busy machine loading TensorFlow takes long enough to be told of.
    line, *others = [line for line in err.splitlines() if not re.fullmatch(r".*, \d+ s", line)]
    assert not others, err
    assert line.startswith("error: ")
    return line


def wait_for(path, process):
    end = time.monotonic() + 200
    while not path.exists():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.05)
