"""Runs command lines of the examples, each in a process of its own.

All that the examples load is loaded once, here, and TensorFlow has not started when the processes
fork, which makes them quick. It reads a JSON list of argument lists, module first, and prints for
each a line with exit code, stdout and stderr.
"""

import json
import os
import runpy
import sys
import tempfile

import sklearn.datasets as _datasets  # noqa: F401
import tqdm as _tqdm  # noqa: F401

import models.mnist.digits as _digits  # noqa: F401
import models.named_dims.trainer as _trainer  # noqa: F401
import models.toy.network as _network  # noqa: F401


def run(arguments):
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        pid = os.fork()
        if not pid:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            sys.argv = list(arguments)
            code = 99
            try:
                runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
            except SystemExit as end:
                code = end.code or 0
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return [os.waitstatus_to_exitcode(status), out.read(), err.read()]


if __name__ == "__main__":
    for arguments in json.load(sys.stdin):
        print(json.dumps(run(arguments)), flush=True)
