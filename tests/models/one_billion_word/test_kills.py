"""A training that is killed again and again computes what one does that nobody disturbs."""

import random
import time

import pytest

from pipemesh.checkpoint import newest, newest_whole
from tests.models.one_billion_word.program import SMALLER, finish, run, start, start_cold
from tests.models.one_billion_word.small_training import summaries

FLAGS = ["--mesh_shape=layers:2;data:2", "--layout=batch:data", "--save_every=1"]
STEPS = 60
# How long a life may be: it ends while TensorFlow is loaded, while the graph is built, or later,
# when something is being saved nearly all the time.
SHORTEST, LONGEST = 1.0, 22.0


def losses(logdir):
    """All values of the loss at each step, from all lives."""
    found = {}
    for tag, step, value in summaries(logdir, killed=True):
        if tag == "loss":
            found.setdefault(step, set()).add(value)
    return found


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kills",
    [
        pytest.param(3, marks=pytest.mark.slow),
        pytest.param(20, marks=pytest.mark.exhaustive),
    ],
)
def test_losses_are_those_of_the_undisturbed_training_and_no_checkpoint_is_lost(tmp_path, kills):
    whole, logdir = tmp_path / "whole", tmp_path / "killed"
    logdir.mkdir()
    run(f"--logdir={whole}", f"--steps={STEPS}", *FLAGS)
    rng, reached = random.Random(kills), 0
    lengths = [rng.uniform(SHORTEST, LONGEST) for _ in range(kills)]
    # The few are to see saving.
    lengths[0] = max(lengths[0], LONGEST)
    for length in lengths:
        process = start_cold(f"--logdir={logdir}", f"--steps={STEPS}", *FLAGS, code=SMALLER)
        time.sleep(length)
        process.kill()
        process.communicate()
        found = newest(str(logdir))
        step = int(found.rpartition("-")[2]) if found else 0
        assert step >= reached, "a checkpoint is lost"
        reached = step
        if found:
            whole_one = newest_whole(str(logdir))
            assert whole_one is not None and whole_one[0] == found, "it is not whole"
    assert reached > 0, "no life was long enough to say anything"
    code, _, err = finish(start(f"--logdir={logdir}", f"--steps={STEPS}", *FLAGS))
    assert code == 0, err
    assert not list(logdir.glob("damaged-*"))
    expected, mine = losses(whole), losses(logdir)
    assert list(expected) == list(range(1, STEPS + 1))
    assert {step: values for step, values in mine.items() if len(values) > 1} == {}
    # Of a life that was killed the last summaries may not be written.
    assert len(mine) > STEPS / 2
    assert {step: expected[step] for step in mine} == mine
