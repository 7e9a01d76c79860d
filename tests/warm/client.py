"""Stands for a program that the server runs: hands over its streams, signals and exit code.

Its arguments are where the server listens, and Python's.
"""

import contextlib
import json
import os
import signal
import socket
import sys

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def main():
    path, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as server:
        try:
            server.connect(path)
        except OSError as error:
            sys.exit(f"{path}: {error}; the process of tests that started the server has ended")
        request = {"arguments": arguments, "cwd": os.getcwd(), "env": dict(os.environ)}
        socket.send_fds(server, [b"."], [0, 1, 2])
        server.sendall(json.dumps(request).encode() + b"\n")

        def forward(number, _):
            # It may just have ended.
            with contextlib.suppress(OSError):
                server.sendall(bytes([number]))

        for number in FORWARDED:
            signal.signal(number, forward)
        status = json.loads(server.makefile().readline())
    if status < 0:
        if -status in FORWARDED:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if __name__ == "__main__":
    main()
