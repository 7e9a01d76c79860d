"""The language model is the same whatever the plan, and trains under lingvo's own trainer."""

import json
import math
import re
import subprocess

import numpy as np
import pytest
import tensorflow as tf
from lingvo import datasets
from lingvo.core import py_utils

from models.one_billion_word.params import OneBillionWordTiny
from pipemesh.plan import Plan
from tests.layers.harness import cluster
from tests.models.one_billion_word.language_model import (
    SMALL,
    pipelined,
    plain,
    random_batch,
    run_tf1,
    run_tf2,
    small,
)
from tests.warm import warm

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
    ("num_stages", "num_micro_batches"),
    [
        (1, 4),
        (2, 1),
        pytest.param(2, 8, marks=pytest.mark.exhaustive),
        pytest.param(4, 4, marks=pytest.mark.exhaustive),
        (4, 8),
    ],
)
def test_loss_gradients_and_weights_equal_the_plain_model(expected, num_stages, num_micro_batches):
    plan = Plan(f"layers:{num_stages}", schedule="gpipe", num_microbatches=num_micro_batches)
    config = small(PLAN=plan, CLIP_GRADIENT_NORM=0.0)
    result = run_tf2(pipelined(config), BATCH, num_devices=num_stages)
    result.assert_close(expected)
    assert len(result.grads) == 37


@pytest.mark.slow
def test_everything_is_equal_in_a_session_too(expected):
    config = small(PLAN=Plan("layers:2", num_microbatches=2), CLIP_GRADIENT_NORM=0.0)
    weights = expected.initial
    result = run_tf1(pipelined(config), BATCH, weights=weights, num_devices=2)
    result.assert_close(run_tf1(plain(config), BATCH, weights=weights))


@pytest.mark.slow
def test_both_execution_modes_agree_without_dropout(expected):
    config = small(PLAN=Plan("layers:2", num_microbatches=2), DROPOUT_PROB=0.0)
    eager = run_tf2(pipelined(config), BATCH, num_devices=2)
    session = run_tf1(pipelined(config), BATCH, weights=eager.initial, num_devices=2)
    session.assert_close(eager)


TRAINER = """
import json
import runpy
import sys
import time
from models.one_billion_word.params import OneBillionWordTiny
from pipemesh.plan import Plan

for name, value in json.loads(sys.argv.pop(1)).items():
    setattr(OneBillionWordTiny, name, Plan.from_text(value) if name == "PLAN" else value)
# lingvo's runners wait for each other for half a minute, whether there is need to or not.
sleep = time.sleep
time.sleep = lambda seconds: sleep(min(seconds, 0.5))
runpy.run_module("pipemesh.layers.lingvo_trainer", run_name="__main__", alter_sys=True)
"""


@pytest.fixture(scope="module")
def lingvos_trainer(cache_dir, tmp_path_factory):
    """Runs lingvo's trainer in a process of its own, always with one log directory."""
    logdir = tmp_path_factory.mktemp("lingvo")

    def run(*flags, plan="mesh=layers:2 num_microbatches=2", folder=logdir):
        sizes = {**SMALL, "VOCAB_SIZE": 600, "PLAN": plan, "CACHE_DIR": cache_dir}
        common = [
            "--run_locally=cpu",
            "--model=models.one_billion_word.params.OneBillionWordTiny",
            f"--logdir={folder}",
            "--model_params_override=train.max_steps:3",
        ]
        program = warm("-c", TRAINER, json.dumps(sizes))
        done = subprocess.run(
            [*program, *common, *flags], capture_output=True, text=True, timeout=280
        )
        return done, logdir

    return run


@pytest.fixture(scope="module")
def trained(lingvos_trainer):
    """Three steps with a stage on each of two CPU devices."""
    return lingvos_trainer(
        "--mode=sync", "--job=controller,trainer_client", "--worker_split_size=2"
    )


@pytest.mark.slow
def test_the_registered_model_trains_under_lingvos_trainer_on_two_devices(trained):
    """lingvo gives a local worker one CPU device, and ends in an AssertionError with two stages."""
    done, logdir = trained
    assert done.returncode == 0, done.stderr[-3000:]
    assert (logdir / "train" / "ckpt-00000003.index").exists()
    steps = re.findall(r"step: +(\d+), .* loss:(\S+)", done.stderr)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    # The logarithm of 600 pieces is what a model that knows nothing pays.
    assert all(abs(float(loss) - math.log(600)) < 1 for _, loss in steps)
    assert re.search(r"InitDevices .*device:CPU:0'.*device:CPU:1'\]", done.stderr)


@pytest.mark.exhaustive
def test_it_trains_under_lingvos_trainer_split_over_three_axes(lingvos_trainer, tmp_path):
    plan = (
        "mesh=layers:2;data:2;model:2 layout=batch:data;heads:model;d_ff:model;vocab:model "
        "num_microbatches=2"
    )
    flags = ["--mode=sync", "--job=controller,trainer_client", "--worker_split_size=8"]
    done, _ = lingvos_trainer(*flags, plan=plan, folder=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    steps = re.findall(r"step: +(\d+), .* loss:(\S+)", done.stderr)
    assert [int(step) for step, _ in steps] == [1, 2, 3]
    assert all(abs(float(loss) - math.log(600)) < 1 for _, loss in steps)
    names = {name for name, _ in tf.train.list_variables(str(tmp_path / "train"))}
    assert any("table_slice_1" in name for name in names)


@pytest.mark.slow
def test_lingvos_evaler_finds_the_held_out_text(trained, lingvos_trainer):
    assert trained[0].returncode == 0
    done, logdir = lingvos_trainer("--mode=sync", "--job=evaler_heldout", "--worker_split_size=2")
    assert done.returncode == 0, done.stderr[-3000:]
    (scores,) = (logdir / "eval_heldout").glob("score-*.txt")
    assert re.search(r"loss: \d", scores.read_text())
    graph = (logdir / "eval_heldout" / "eval_heldout.pbtxt").read_text()
    graph = graph[: graph.index("library {")]
    call = re.compile(r'name: "[^"]*action_\d+F\d+/(Stateful)?PartitionedCall"')
    actions = [node for node in graph.split("node {") if call.search(node)]
    devices = [re.findall(r'device: "[^"]*(CPU:\d)"', node)[-1] for node in actions]
    assert sorted(devices) == ["CPU:0"] * 2 + ["CPU:1"] * 2, "two stages, two microbatches"


@pytest.mark.slow
def test_lingvos_decoder_says_why_it_does_not_work(trained, lingvos_trainer):
    """It ran, and wrote nothing."""
    assert trained[0].returncode == 0
    done, _ = lingvos_trainer("--mode=sync", "--job=decoder_heldout")
    assert done.returncode != 0
    assert "LanguageModel is no decoder job of lingvo's" in done.stderr.splitlines()[-1]


def test_only_texts_are_data_sets_of_lingvo():
    assert datasets.GetDatasets(OneBillionWordTiny) == ["Dev", "Heldout", "Test", "Train"]


def test_the_inference_graph_scores_any_number_of_rows():
    """It was empty, without a word."""
    config = small()
    py_utils.SetEagerMode(False, test_mode=True)
    rows = {name: values[:3] for name, values in BATCH.items()}
    with tf.Graph().as_default(), cluster(1, do_eval=True):
        py_utils.GetOrCreateGlobalStepVar()
        p = pipelined(config)
        p.input = config.Heldout()
        task = p.Instantiate()
        fetches, feeds = task.Inference()["default"]
        expected = task.ComputePredictions(
            task.theta, py_utils.NestedMap({k: tf.constant(v) for k, v in rows.items()})
        )
        with tf.compat.v1.Session() as session:
            session.run(tf.compat.v1.global_variables_initializer())
            found, expected = session.run(
                [fetches, expected], {feeds[name]: values for name, values in rows.items()}
            )
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, err_msg=name)
    assert found.xent.shape == rows["ids"].shape


@pytest.mark.slow
def test_lingvos_trainer_writes_the_inference_graph(lingvos_trainer):
    done, logdir = lingvos_trainer("--mode=write_inference_graph")
    assert done.returncode == 0, done.stderr[-3000:]
    text = (logdir / "inference_graphs" / "inference.pbtxt").read_text()
    assert all(f'"{name}"' in text for name in ("xent", "loss", *BATCH))
