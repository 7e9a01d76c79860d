"""`pipemesh train` and `pipemesh evaluate` as users start them, where what they load is there."""

from tests.models.one_billion_word.program import finish, open_process
from tests.warm import warm

CODE = """
import sys
from pipemesh.commands import main as cli
cli.main(sys.argv[1:])
"""

# Ends the process that loads TensorFlow, which is found.
WITHOUT_TENSORFLOW = """
import sys
from importlib.machinery import ModuleSpec
class Finder:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name == "tensorflow" else None
    def create_module(self, spec):
        sys.exit("TensorFlow is loaded")
sys.meta_path.insert(0, Finder())
from pipemesh.commands import main as cli
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
