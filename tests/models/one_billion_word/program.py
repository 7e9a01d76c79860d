"""The training program as users start it, or with what it loads already there."""

import os
import re
import subprocess
import sys
import time

from tests.warm import warm

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
MODULE = "models.one_billion_word.train"
# With two blocks of five.
SMALLER = f"""
import runpy
from models.one_billion_word import sizes
sizes.Tiny.NUM_LAYERS = 2
runpy.run_module({MODULE!r}, run_name="__main__", alter_sys=True)
"""


def start(*flags, code=SMALLER):
    """Starts code that runs it, where what it loads is there already."""
    return open_process(warm("-c", code, *SMALL, *flags))


def open_process(command, **streams):
    """A process whose streams are read."""
    return subprocess.Popen(
        command,
        **streams,
        # As from a shell, not with the log level of the tests.
        env={k: v for k, v in os.environ.items() if k != "TF_CPP_MIN_LOG_LEVEL"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, text=None):
    """The process's exit code, and what it wrote to stdout and stderr; it reads a text."""
    try:
        out, err = process.communicate(text, timeout=240)
    finally:
        process.kill()
    return process.returncode, out, err


def run(*flags):
    """What it prints when all goes well."""
    status, out, err = finish(start(*flags))
    assert status == 0, err
    return out


def refused(*flags):
    """The one line that says why, as users start it; TensorFlow is not needed for it."""
    code, _, err = finish(open_process([sys.executable, "-m", MODULE, *SMALL, *flags]))
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
