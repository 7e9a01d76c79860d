"""Workers in processes of their own, to be tested with."""

import concurrent.futures
import contextlib
import re
import subprocess
import sys
import threading

import grpc

from tests.warm import warm

COMMAND = [sys.executable, "-m", "pipemesh", "worker"]
SECONDS = 120


def start(*arguments, command=None):
    """A worker that begins to start."""
    words = [*(command or warm("-m", "pipemesh", "worker")), "--port=0", *arguments]
    return subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def address_of(worker):
    """Waits until it listens."""
    late = threading.Timer(SECONDS, worker.kill)
    late.start()
    try:
        said = ""
        for line in worker.stderr:
            said += line
            if found := re.search(r"pipemesh worker: (\S+:\d+);", line):
                return found[1]
    finally:
        late.cancel()
    raise AssertionError(f"it does not listen: {said}")


@contextlib.contextmanager
def serving(answer):
    """A server of another kind, and its address; None is no answer to a method of this name."""

    class Handler(grpc.GenericRpcHandler):
        def service(self, details):
            content = answer(details.method)
            return content and grpc.unary_unary_rpc_method_handler(lambda *_: content())

    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[Handler()])
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield address
    finally:
        server.stop(0).wait()


@contextlib.contextmanager
def started(number, *arguments):
    """Workers, and their addresses; they are ended in any case."""
    there = [start(*arguments) for _ in range(number)]
    try:
        yield there, [address_of(worker) for worker in there]
    finally:
        for worker in there:
            worker.kill()
            worker.communicate()
