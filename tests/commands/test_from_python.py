"""Errors of `pipemesh.decode` and `pipemesh.score` from Python need no TensorFlow."""

import subprocess
import sys

import pytest

import pipemesh
from pipemesh.errors import DecodingError


@pytest.mark.parametrize(
    ("texts", "flags", "message"),
    [
        ("one", {}, "'one' is one text; give a list of them"),
        (["a\nb"], {}, r"text 1 is 'a\\nb'; give texts of one line each"),
        (["a", " "], {}, "text 2 is ' '; give texts of one line each"),
        ([b"a"], {}, "text 1 is b'a'; give texts of one line each"),
        (["a\ud800"], {}, "which is not UTF-8"),
        (["a"], {"help": True}, "help is for the command alone; leave it out"),
        (["a"], {"prompt": "b"}, "prompt is for the command alone; leave it out"),
        (["a"], {}, "no training is named; give the --logdir of one, or a --checkpoint"),
        (["a"], {"logdir": "/no/such"}, "--logdir='/no/such' has no checkpoint; train first"),
    ],
)
def test_what_cannot_be_had_is_an_error(texts, flags, message):
    with pytest.raises(DecodingError, match=message):
        pipemesh.decode(texts, **flags)


def test_nothing_is_nothing_and_loads_no_tensorflow():
    assert pipemesh.decode([]) == [] == pipemesh.score(iter(()))
    code = "import sys, pipemesh; pipemesh.decode([]); sys.exit('tensorflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
