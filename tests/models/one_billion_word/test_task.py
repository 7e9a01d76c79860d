"""The language model is the same whatever the plan, and trains under lingvo's own trainer."""

import json
import math
import pathlib
import re
import subprocess
import sys

import pytest

from tests.models.one_billion_word.language_model import (
    SMALL,
    pipelined,
    plain,
    random_batch,
    run_tf1,
    run_tf2,
    small,
)

ROOT = pathlib.Path(__file__).parents[3]
BATCH = random_batch()


@pytest.fixture(scope="module")
def expected():
    """The plain model's results, dropout on.

    No clipping: lingvo takes the norm of the plain embedding's gradient before the rows of one
    token are added up, so the plain model is clipped by another factor.
    """
    return run_tf2(plain(small(CLIP_GRADIENT_NORM=0.0)), BATCH)


# The tests of the layers have all nine; these take longer to build.
@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches"), [(1, 4), (2, 1), (2, 8), (4, 4), (4, 8)]
)
def test_loss_gradients_and_weights_equal_the_plain_model(expected, num_stages, num_micro_batches):
    config = small(
        NUM_STAGES=num_stages, NUM_MICRO_BATCHES=num_micro_batches, CLIP_GRADIENT_NORM=0.0
    )
    result = run_tf2(pipelined(config), BATCH, num_devices=num_stages)
    result.assert_close(expected)
    assert len(result.grads) == 37


def test_everything_is_equal_in_a_session_too(expected):
    config = small(NUM_STAGES=2, NUM_MICRO_BATCHES=4, CLIP_GRADIENT_NORM=0.0)
    weights = expected.initial
    result = run_tf1(pipelined(config), BATCH, weights=weights, num_devices=2)
    result.assert_close(run_tf1(plain(config), BATCH, weights=weights))


def test_both_execution_modes_agree_without_dropout(expected):
    config = small(NUM_STAGES=2, NUM_MICRO_BATCHES=2, DROPOUT_PROB=0.0)
    eager = run_tf2(pipelined(config), BATCH, num_devices=2)
    session = run_tf1(pipelined(config), BATCH, weights=eager.initial, num_devices=2)
    session.assert_close(eager)


TRAINER = """
import json
import runpy
import sys
from models.one_billion_word.params import OneBillionWordTiny

for name, value in json.loads(sys.argv.pop(1)).items():
    setattr(OneBillionWordTiny, name, value)
runpy.run_module("lingvo.trainer", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
def test_the_registered_model_trains_under_lingvos_trainer(cache_dir, tmp_path):
    sizes = {**SMALL, "VOCAB_SIZE": 600, "NUM_MICRO_BATCHES": 2, "CACHE_DIR": cache_dir}
    program = [sys.executable, "-c", TRAINER, json.dumps(sizes)]
    flags = [
        "--run_locally=cpu",
        "--mode=sync",
        "--model=models.one_billion_word.params.OneBillionWordTiny",
        f"--logdir={tmp_path}",
        "--model_params_override=train.max_steps:3",
    ]
    done = subprocess.run(
        program + flags,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "train" / "ckpt-00000003.index").exists()
    steps = re.findall(r"step: +(\d+), .* loss:(\S+)", done.stderr)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    # The logarithm of 600 pieces is what a model that knows nothing pays.
    assert all(abs(float(loss) - math.log(600)) < 1 for _, loss in steps)
