"""The run of lingvo's own tests tells what fails with pipemesh, and what fails anyway."""

import subprocess
import sys

import pytest

TEST_FILE = """
import unittest
from lingvo.core import gpipe, recurrent, test_utils
from lingvo.core.gpipe import PipeliningLayer

class Test(test_utils.TestCase):
    def test_replaced(self):
        self.assertEqual(gpipe.SeqLayer.__module__.split(".")[0], "pipemesh")
        self.assertEqual(PipeliningLayer.__module__, "pipemesh.layers.pipeline.pipelining")
        self.assertEqual(recurrent.Recurrent.__module__, "pipemesh.recurrent.time.recurrent")

    def test_only_lingvo_has_it(self):
        recurrent._SeqPaddingLength

    def test_fails_anyway(self):
        self.fail("always")

    def test_skipped(self):
        self.skipTest("here")
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_what_fails_runs_again_with_lingvos_own_modules(tmp_path):
    path = tmp_path / "lingvo" / "core" / "made_up_test.py"
    path.parent.mkdir(parents=True)
    path.write_text(TEST_FILE)
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.layers.lingvo_suite", tmp_path),
            *("core/made_up_test.py", "--match", "Test.test_"),
        ],
        capture_output=True,
        text=True,
        timeout=280,
        check=True,
    )
    # One more is skipped in every lingvo test: `test_session`.
    assert done.stdout.splitlines()[-1] == "| `core/made_up_test.py` | 5 | 2 | 1 | 1 | 1 |"
    (line,) = done.stderr.splitlines()
    assert line.endswith(
        "Test.test_only_lingvo_has_it failed: "
        "AttributeError: pipemesh.recurrent has no _SeqPaddingLength"
    )
