"""What several processes train together is what one process trains."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.hosts.cluster import own_process
from tests.lowering.hosts_process import free_ports
from tests.warm import warm

SPLIT = "heads:model;d_ff:model;vocab:model"
SIMD = "num_microbatches=4 lowering=simd schedule"
OF_TWO = [
    f"mesh=layers:2 layout=vocab:layers {SIMD}=gpipe",
    f"mesh=layers:1;data:2 layout=batch:data {SIMD}=gpipe",
    f"mesh=layers:1;model:2 layout={SPLIT} {SIMD}=gpipe",
]
OF_FOUR = [
    f"mesh=layers:2;data:2 layout=batch:data {SIMD}=gpipe",
    f"mesh=layers:2;model:2 layout={SPLIT} {SIMD}=looped_bfs:2",
    f"mesh=layers:1;data:2;model:2 layout=batch:data;{SPLIT} {SIMD}=gpipe",
]
MORE = [
    f"mesh=layers:4 layout=vocab:layers {SIMD}=gpipe",
    f"mesh=layers:1;model:4 layout=d_ff:model;vocab:model {SIMD}=gpipe",
    f"mesh=layers:1;data:4 layout=batch:data {SIMD}=gpipe",
]
STEPS = 20
# Processes agree bit for bit. With one process they agree to round-off: sums of more than two
# numbers have another order under each plan, and a loss passes that on from step to step.
ROUND_OFF = 2e-5


def trained(number, folder, plans, steps=STEPS):
    """What each of so many processes prints of each plan, process by process; 0 is one alone."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(number)]
    words = [str(steps), str(folder), *plans]
    started = [
        subprocess.Popen(
            warm("-m", "tests.hosts.together", ",".join(addresses), str(index), *words),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A proxy at which nobody listens is not asked for processes.
            env={**os.environ, "http_proxy": "http://127.0.0.1:9"},
        )
        for index in range(max(1, number))
    ]
    try:
        told = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
            process.communicate()
    assert not any(process.returncode for process in started), told[0][1][-3000:]
    return [[json.loads(line) for line in out.splitlines() if line[:1] == "{"] for out, _ in told]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process trains, for as many steps as all that go on from each other."""
    folder = tmp_path_factory.mktemp("alone")
    return trained(0, folder, OF_TWO[:1])[0] + trained(0, folder, OF_TWO[:1], STEPS + 4)[0]


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes train under each plan."""
    return trained(2, tmp_path_factory.mktemp("two"), OF_TWO)


@pytest.fixture(scope="module")
def of_four(tmp_path_factory, of_two):
    """What four processes train; under the first plan they go on from what two have saved."""
    folder = tmp_path_factory.mktemp("four")
    shutil.copytree(pathlib.Path(of_two[0][0]["saved"]).parent, folder / "0")
    return trained(4, folder, OF_FOUR)


def assert_same(found, plans, alone):
    """Under each plan all processes have trained what one trains under the first plan."""
    number = len(found)
    for at, plan in enumerate(plans):
        (one,) = (each for each in alone if each["first"] == found[0][at]["first"])
        for process in found:
            losses = process[at]["losses"]
            assert len(set(losses)) == STEPS
            assert losses == found[0][at]["losses"]
            np.testing.assert_allclose(losses, one["losses"][:STEPS], rtol=ROUND_OFF, err_msg=plan)
            # No process has all weights, but where batches alone are split.
            share = process[at]["elements"] / one["elements"]
            assert (
                share == 1
                if re.fullmatch(r"layers:1;data:\d", plan.split()[0][5:])
                else share < 0.8
            )
        tasks = [re.search(r"task:(\d+)", d)[1] for d in found[0][at]["devices"]]
        assert {tasks.count(str(i)) for i in range(number)} == {len(tasks) // number}


def assert_same_checkpoint(found, wanted):
    """Of everything, each tensor once, whoever has written it."""
    found, wanted = (tf.train.load_checkpoint(each["saved"]) for each in (found, wanted))
    shapes = wanted.get_variable_to_shape_map()
    assert shapes == found.get_variable_to_shape_map()
    for name in shapes:
        np.testing.assert_allclose(
            found.get_tensor(name), wanted.get_tensor(name), rtol=1e-3, atol=1e-4, err_msg=name
        )


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_what_one_does(alone, of_two):
    assert_same(of_two, OF_TWO, alone)
    for found in of_two[0]:
        assert_same_checkpoint(found, alone[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_train_what_one_does(alone, of_four):
    assert_same(of_four, OF_FOUR, alone)
    for found in of_four[0][1:]:
        assert_same_checkpoint(found, alone[0])


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_one_goes_on_from_what_four_have_saved_and_they_from_what_two_have(
    alone, of_four, tmp_path
):
    """Under another plan each time."""
    shutil.copytree(pathlib.Path(of_four[0][0]["saved"]).parent, tmp_path / "0")
    ((last,),) = trained(0, tmp_path, OF_TWO[:1], 4)
    assert [each["first"] for each in (of_four[0][0], last)] == [STEPS, 2 * STEPS]
    losses = [*of_four[0][0]["losses"], *last["losses"]]
    np.testing.assert_allclose(losses, alone[1]["losses"], rtol=ROUND_OFF)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:slices along")
@pytest.mark.parametrize(("number", "plans"), [(2, OF_FOUR), (2, MORE), (4, MORE)])
def test_any_processes_train_what_one_does(number, plans, alone, tmp_path):
    assert_same(trained(number, tmp_path, plans), plans, alone)


LANGUAGE_MODEL = [
    *(sys.executable, "-m", "models.one_billion_word.train", "--mesh_shape=layers:1;data:2"),
    *("--layout=batch:data", "--lowering=simd", "--num_microbatches=2", "--dropout_prob=0.1"),
    *("--batch_size=4", "--sequence_length=16", "--steps=14", "--save_every=4", "--eval_every=7"),
    *("--eval_batches=2", "--log_format=json", "--worker_answer=3"),
]


def number_of(pid):
    """Which of several processes one is, by its environment; None if it is none."""
    with contextlib.suppress(OSError, StopIteration):
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        text = next(word for word in words if word.startswith(b"TF_CONFIG=")).decode()
        return own_process({"TF_CONFIG": text.partition("=")[2]})
    return None


def children(pid):
    text = pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8")
    return {number_of(child): int(child) for child in text.split()}


@pytest.mark.slow
@pytest.mark.serial
@pytest.mark.timeout(900)
def test_one_that_is_killed_is_named_and_all_go_on_from_the_last_checkpoint(tmp_path):
    """The command in every process, by the launcher; the curve is that of one process."""
    alone = subprocess.run(
        [*LANGUAGE_MODEL, f"--logdir={tmp_path / 'alone'}"],
        capture_output=True,
        text=True,
        timeout=400,
        check=True,
    )
    launch = [sys.executable, "-m", "pipemesh", "launch", "--processes=2", "--"]
    process = subprocess.Popen(
        [*launch, *LANGUAGE_MODEL, f"--logdir={tmp_path / 'together'}"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    told, killed = [], False
    try:
        for line in process.stdout:
            told.append(json.loads(line))
            if told[-1].get("event") == "step" and told[-1]["step"] == 10 and not killed:
                os.kill(children(process.pid)[1], signal.SIGKILL)
                killed = True
        _, said = process.communicate(timeout=60)
    finally:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        process.kill()
        process.communicate()
    assert process.returncode == 0, said[-3000:]
    assert re.search(r"process 1 \(127\.0\.0\.1:\d+, stage 0\) is .*, in .*; going on", said)
    begun = [each["restored"] for each in told if each["event"] == "begin"]
    assert begun == [None, str(tmp_path / "together" / "ckpt-8")]
    wanted, found = (
        {each["step"]: each["loss"] for each in every if each["event"] == "step"}
        for every in (map(json.loads, alone.stdout.splitlines()), told)
    )
    assert set(found) == set(range(1, 15))
    np.testing.assert_allclose([found[i] for i in wanted], list(wanted.values()), rtol=1e-4)
