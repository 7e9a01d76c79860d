"""Standard streams that are closed or full, of the whole program."""

import os
import subprocess

import pytest

from tests.models.one_billion_word.disturbed import assert_goes_on, assert_kept, begin
from tests.models.one_billion_word.program import finish

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full"),
]

CLOSED = 'exec "$@" <&- >&- 2>&-'


@pytest.fixture
def full():
    with open("/dev/full", "w") as file:
        yield file


def test_standard_output_on_a_full_disk_is_told_once_and_training_goes_on(
    full, undisturbed, tmp_path
):
    logdir = tmp_path / "run"
    code, _, err = finish(begin(logdir, steps=3, stdout=full))
    assert code == 0
    told = "standard output is closed (No space left on device); going on"
    assert err.count(told) == 1 and "Error" not in err
    assert_kept(logdir, 3, undisturbed)
    assert_goes_on(logdir, 3, undisturbed)


def test_both_streams_on_a_full_disk_and_no_input(full, undisturbed, tmp_path):
    logdir = tmp_path / "run"
    streams = {"stdin": subprocess.DEVNULL, "stdout": full, "stderr": full}
    assert finish(begin(logdir, steps=3, **streams))[0] == 0
    assert_kept(logdir, 3, undisturbed)
    # Nor is an error in the flags less of an error.
    assert finish(begin(logdir, "--steps=x", cold=True, **streams))[0] == 2


def test_all_three_streams_closed_from_the_beginning(undisturbed, tmp_path):
    logdir = tmp_path / "run"
    closed = ["sh", "-c", CLOSED, "sh"]
    assert finish(begin(logdir, steps=3, cold=True, wrap=closed)) == (0, "", "")
    assert_kept(logdir, 3, undisturbed)
    assert finish(begin(logdir, "--steps=x", cold=True, wrap=closed)) == (2, "", "")
    assert_goes_on(logdir, 3, undisturbed)
