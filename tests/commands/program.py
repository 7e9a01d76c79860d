"""`pipemesh train` and `pipemesh evaluate` as users start them, where what they load is there."""

import atexit
import contextlib
import functools
import importlib
import io
import json
import os
import subprocess
import sys

import pytest
from lingvo.core import py_utils

from pipemesh.commands import process, workers
from pipemesh.commands.flags import FLAGS
from pipemesh.commands.main import MODULES
from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

CODE = """
import sys
from pipemesh.commands import main as cli
cli.main(sys.argv[1:])
"""

# Answers lists of command lines, where neither TensorFlow nor lingvo can be loaded.
_ANSWERS = """
import contextlib, io, json, os, sys
sys.modules["tensorflow"] = sys.modules["lingvo"] = sys.modules["keras"] = None
from models.one_billion_word import decode, sizes, train
from pipemesh.commands import process, runs, texts

def answer(name, *words):
    function = {"lm": train.main, "lm decode": decode.main}.get(name)
    function = function or getattr(runs, name, None) or getattr(texts, name)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = process.exit_code(lambda: function([name, *words]))
        except SystemExit as end:
            code = end.code
    return code, out.getvalue(), err.getvalue()

for line in sys.stdin:
    folder, environment, sizes.Tiny.NUM_LAYERS, command_lines = json.loads(line)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    print(json.dumps([answer(*words) for words in command_lines]), flush=True)
"""


@functools.cache
def _answering():
    """The process that answers, one for all tests of a process."""
    answering = open_process([sys.executable, "-c", _ANSWERS], stdin=subprocess.PIPE)
    atexit.register(finish, answering)
    return answering


def without_tensorflow(*command_lines, layers=5):
    """The exit code, output and errors of commands, which need no TensorFlow for their answer.

    Each begins with the name of the command; `lm` is the program that trains the language model,
    whose smallest size has this many layers.
    """
    answering = _answering()
    request = [os.getcwd(), dict(os.environ), layers, command_lines]
    print(json.dumps(request), file=answering.stdin, flush=True)
    line = answering.stdout.readline()
    assert line, answering.communicate()
    return json.loads(line)


def run(*words):
    """The exit code, and what was written to stdout and stderr."""
    return finish(open_process(warm("-c", CODE, *words)))


def done(*words):
    """What it prints when all goes well."""
    code, out, err = run(*words)
    assert code == 0, err
    return out


@contextlib.contextmanager
def _devices_of_tests():
    """Lets commands compute on the devices that the tests' process has, in lingvo's eager mode."""
    set_mode, was_eager = py_utils.SetEagerMode, py_utils.IsEagerMode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "start_tensorflow", lambda *_: None)
        # It would replace this process when a worker of a later test is lost.
        patch.setattr(workers, "go_on_by_itself", lambda: None)
        patch.setattr(
            py_utils, "SetEagerMode", lambda mode, test_mode=True: set_mode(mode, test_mode=True)
        )
        try:
            yield
        finally:
            set_mode(was_eager, test_mode=True)


def refused(name, *words):
    """The one line that says why; the command runs in this process, which has all that it loads."""
    module = importlib.import_module(f"pipemesh.commands.{MODULES.get(name, name)}")
    command = getattr(module, name if name in MODULES else "main")
    out, err = io.StringIO(), io.StringIO()
    with _devices_of_tests(), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = process.exit_code(lambda: command([f"pipemesh {name}", *words]))
        finally:
            FLAGS.declare([])
    err = err.getvalue()
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if not line.endswith(" s")]
    return line
