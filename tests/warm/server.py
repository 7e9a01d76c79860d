"""Loads what programs load, and forks itself for each; its argument is the socket it listens on.

No thread may run when it forks, and no device of TensorFlow may exist: both stay behind. So it
imports, and does nothing else.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import types

from tests.warm import CLIENT

# Not what defines the flags of a program.
PRELOADED = (
    # First: it holds back what TensorFlow says while it is loaded.
    "models",
    "pipemesh.training.run.loop",
    "models.one_billion_word.params",
    "pipemesh.training.trainer",
)
# Seconds after which it is seen at the latest that a program has ended.
POLL = 0.01


def serve(listener):
    """Returns what to run, in a process that is to run it."""
    # Who interrupts the tests does not mean this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    begun = 0
    while True:
        ready, _, _ = select.select([listener, sys.stdin], [], [])
        if sys.stdin in ready:
            os._exit(0)
        client, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            return receive(client)
        client.close()
        begun += 1
        while begun and os.waitpid(-1, os.WNOHANG)[0]:
            begun -= 1


def receive(client):
    """Forks again: one process runs the program, the other looks after it."""
    _, streams, _, _ = socket.recv_fds(client, 1, 3)
    request = json.loads(client.makefile().readline())
    program = os.fork()
    if program:
        for fd in (*streams, 0, 1, 2):
            os.close(fd)
        look_after(program, client)
    client.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, fd in enumerate(streams):
        os.dup2(fd, number)
        os.close(fd)
    return request


def look_after(program, client):
    """Hands on signals, and the exit code; who gives up the client gives up the program."""
    while True:
        ready, _, _ = select.select([client], [], [], POLL)
        if ready:
            numbers = client.recv(100) or [signal.SIGKILL]
            for number in numbers:
                os.kill(program, number)
        ended, status = os.waitpid(program, os.WNOHANG)
        if ended:
            # Nobody may be there to read it.
            with contextlib.suppress(OSError):
                client.sendall(b"%d\n" % os.waitstatus_to_exitcode(status))
            os._exit(0)


def run(set_by_imports, arguments, cwd, env):
    """Does what Python does with arguments."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update({**set_by_imports, **env})
    how, what, *rest = arguments
    sys.argv = [how, *rest]
    if how == "-m":
        runpy.run_module(what, run_name="__main__", alter_sys=True)
        return
    module = sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(what, "<string>", "exec"), vars(module))


def main():
    listener = socket.socket(fileno=int(sys.argv[1]))
    before = dict(os.environ)
    for name in PRELOADED:
        importlib.import_module(name)
    # Such as the way in which TensorFlow sends to workers, which lingvo sets.
    set_by_imports = dict(os.environ.items() - before.items())
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, threads
    # Else each process would copy what it only looks at.
    gc.freeze()
    address, request = listener.getsockname(), serve(listener)
    # For a program that replaces itself.
    sys.orig_argv = [sys.executable, *CLIENT, address, *request["arguments"]]
    run(set_by_imports, **request)


if __name__ == "__main__":
    main()
