"""`pipemesh train` and `pipemesh evaluate` as users start them, where what they load is there."""

from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

CODE = """
import sys
from pipemesh import cli
cli.main(sys.argv[1:])
"""


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
