"""What several processes train together is what one process trains."""

import contextlib
import json
import os
import pathlib
import re
import signal
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf

from tests.lowering.hosts_process import free_ports

SPLIT = "heads:model;d_ff:model;vocab:model"
SIMD = "num_microbatches=4 lowering=simd schedule"
PLANS = [
    f"mesh=layers:2;data:2 layout=batch:data {SIMD}=gpipe",
    f"mesh=layers:2;model:2 layout={SPLIT} {SIMD}=gpipe",
    f"mesh=layers:4 layout=vocab:layers {SIMD}=gpipe",
    f"mesh=layers:1;data:2;model:2 layout=batch:data;{SPLIT} {SIMD}=gpipe",
    f"mesh=layers:2;data:2 layout=batch:data {SIMD}=looped_bfs:2",
    f"mesh=layers:1;model:4 layout=d_ff:model;vocab:model {SIMD}=gpipe",
]
STEPS = 20
COMMAND = [sys.executable, "-m", "tests.hosts.together"]


def trained(number, folder, plans, steps):
    """What each of so many processes prints of each plan, process by process; 0 is one alone."""
    addresses = [f"127.0.0.1:{port}" for port in free_ports(number)]
    started = [
        subprocess.Popen(
            [*COMMAND, ",".join(addresses), str(index), str(steps), str(folder), *plans],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(max(1, number))
    ]
    try:
        told = [process.communicate(timeout=400) for process in started]
    finally:
        for process in started:
            process.kill()
    assert not any(process.returncode for process in started), told[0][1][-3000:]
    return [[json.loads(line) for line in out.splitlines() if line[:1] == "{"] for out, _ in told]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one process trains, by plan."""
    found = trained(0, tmp_path_factory.mktemp("alone"), PLANS, STEPS)[0]
    return dict(zip(PLANS, found, strict=True))


def assert_same(number, plans, alone, tmp_path):
    """Processes agree bit for bit, and with one process to round-off.

    A sum of two numbers is the same in any order, of more it is not: where all sums are of
    processes alone, or inside of one alone, in pairs, losses are those of one process bit for bit.
    """
    together = trained(number, tmp_path / "together", plans, STEPS)
    for at, plan in enumerate(plans):
        one = alone[plan]
        assert len(set(one["losses"])) == STEPS
        for process in together:
            print(plan, np.max(np.abs(np.divide(process[at]["losses"], one["losses"]) - 1)))
            np.testing.assert_allclose(process[at]["losses"], one["losses"], rtol=2e-5)
            assert process[at]["losses"] == together[0][at]["losses"]
        tasks = [re.search(r"task:(\d+)", d)[1] for d in together[0][at]["devices"]]
        assert {tasks.count(str(i)) for i in range(number)} == {len(tasks) // number}
        # What they have written together is one checkpoint of everything, each tensor once.
        one_file, joined = map(tf.train.load_checkpoint, (one["saved"], together[0][at]["saved"]))
        shapes = one_file.get_variable_to_shape_map()
        assert shapes == joined.get_variable_to_shape_map(), plan
        for name in shapes:
            np.testing.assert_allclose(
                joined.get_tensor(name), one_file.get_tensor(name), rtol=1e-3, atol=1e-4
            )
        if "layers:1" not in plan:
            assert all(process[at]["parts"] < one["parts"] for process in together)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_train_what_one_does(alone, tmp_path):
    assert_same(2, PLANS[:3], alone, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.filterwarnings("ignore:slices along")
def test_four_processes_train_what_one_does(alone, tmp_path):
    assert_same(4, PLANS[3:], alone, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_go_on_from_what_two_have_saved_and_one_from_theirs(alone, tmp_path):
    found = [trained(number, tmp_path / "moved", PLANS[:1], 4)[0][0] for number in (2, 4, 0)]
    assert [each["first"] for each in found] == [0, 4, 8]
    losses = [loss for each in found for loss in each["losses"]]
    np.testing.assert_allclose(losses, alone[PLANS[0]]["losses"][:12], rtol=2e-5)


LANGUAGE_MODEL = [
    *(sys.executable, "-m", "models.one_billion_word.train", "--mesh_shape=layers:1;data:2"),
    *("--layout=batch:data", "--lowering=simd", "--num_microbatches=2", "--dropout_prob=0.1"),
    *("--batch_size=4", "--sequence_length=16", "--steps=14", "--save_every=4", "--eval_every=7"),
    *("--eval_batches=2", "--log_format=json", "--worker_answer=3"),
]


def number_of(pid):
    """Which of several processes one is, by its environment; None if it is none."""
    with contextlib.suppress(OSError, StopIteration, ValueError, KeyError):
        words = pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        text = next(word for word in words if word.startswith(b"TF_CONFIG=")).decode()
        return json.loads(text.partition("=")[2])["task"]["index"]
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
    launch = [sys.executable, "-m", "pipemesh.cli", "launch", "--processes=2", "--"]
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


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:slices along")
@pytest.mark.parametrize(("number", "plans"), [(2, PLANS[3:]), (4, PLANS[:3])])
def test_any_processes_train_what_one_does(number, plans, alone, tmp_path):
    assert_same(number, plans, alone, tmp_path)
