"""`pipemesh train` and `pipemesh evaluate` as users start them, where what they load is there."""

import json
import subprocess
import sys

from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

CODE = """
import sys
from pipemesh.commands import main as cli
cli.main(sys.argv[1:])
"""

# Answers command lines, one after the other, where neither TensorFlow nor lingvo can be loaded.
_ANSWERS = """
import contextlib, io, json, sys
sys.modules["tensorflow"] = sys.modules["lingvo"] = sys.modules["keras"] = None
from models.one_billion_word import decode, sizes, train
from pipemesh.commands import process, runs, texts
layers, command_lines = json.load(sys.stdin)
sizes.Tiny.NUM_LAYERS = layers

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

print(json.dumps([answer(*words) for words in command_lines]))
"""


def without_tensorflow(*command_lines, layers=5):
    """The exit code, output and errors of commands, which need no TensorFlow for their answer.

    Each begins with the name of the command; `lm` is the program that trains the language model,
    whose smallest size has this many layers.
    """
    process = open_process([sys.executable, "-c", _ANSWERS], stdin=subprocess.PIPE)
    code, out, err = finish(process, json.dumps([layers, command_lines]))
    assert code == 0, err
    return json.loads(out)


def run(*words):
    """The exit code, and what was written to stdout and stderr."""
    return finish(open_process(warm("-c", CODE, *words)))


def done(*words):
    """What it prints when all goes well."""
    code, out, err = run(*words)
    assert code == 0, err
    return out


def refused(*words):
    """The one line that says why."""
    code, _, err = run(*words)
    assert code == 2, err
    (line,) = [line for line in err.splitlines() if not line.endswith(" s")]
    return line
