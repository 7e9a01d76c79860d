"""Programs in processes of their own, without the seconds in which each loads TensorFlow.

A server loads them once for all processes of tests and forks itself for each program. What stands
between is a small client that the test starts, signals and reads as if it were the program.
"""

import atexit
import fcntl
import functools
import os
import pathlib
import socket
import subprocess
import sys

FOLDER = pathlib.Path(__file__).parent
# What Python is given to run a client, before where the server listens.
CLIENT = ["-I", "-S", str(FOLDER / "client.py")]


def warm(*arguments):
    """The command that does what Python does with these arguments.

    For programs that load TensorFlow in any case: a test of what happens until then, or of how
    they are loaded, starts Python itself.

    Args:
        *arguments: `-m`, a module and its arguments, or `-c`, code and its arguments.
    """
    assert arguments[0] in ("-m", "-c"), arguments
    return [sys.executable, *CLIENT, _address(), *map(str, arguments)]


@functools.cache
def _address():
    """Returns where the server listens; who asks first starts it."""
    path = os.path.join(os.environ["PIPEMESH_TESTS_FOLDER"], "warm")
    with open(f"{path}.lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not os.path.exists(path):
            _start(path)
    return path


def _start(path):
    """Starts the server, which ends when this process does: processes of tests end together."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    # From now on clients wait until it is ready.
    listener.listen()
    # The server shall hold back what TensorFlow says, and fork while it has one thread. Arrow,
    # which pandas loads where it is installed, starts one for its memory.
    left_out = ("TF_CPP_MIN_LOG_LEVEL",)
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    one_thread = {
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "JE_ARROW_MALLOC_CONF": "background_thread:false",
    }
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.warm.server", str(listener.fileno())],
        cwd=FOLDER.parents[1],
        env={**env, **one_thread},
        stdin=subprocess.PIPE,
        # What is no terminal is buffered, as it will be for those who read it.
        stdout=subprocess.DEVNULL,
        pass_fds=[listener.fileno()],
    )
    listener.close()

    def end():
        # Of a process that is killed the system closes it.
        server.stdin.close()
        server.wait()

    atexit.register(end)
