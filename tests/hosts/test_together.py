"""What several processes train together is what one process trains."""

import json
import re
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


def assert_same(number, plans, tmp_path):
    (alone,) = trained(0, tmp_path / "alone", plans, STEPS)
    together = trained(number, tmp_path / "together", plans, STEPS)
    for at, (plan, one) in enumerate(zip(plans, alone, strict=True)):
        assert len(set(one["losses"])) == STEPS
        for process in together:
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
def test_two_processes_train_what_one_does(tmp_path):
    assert_same(2, PLANS[:3], tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_four_processes_go_on_from_what_two_have_saved_and_one_from_theirs(tmp_path):
    (alone,) = trained(0, tmp_path / "alone", PLANS[:1], 12)
    found = [trained(number, tmp_path / "moved", PLANS[:1], 4)[0][0] for number in (2, 4, 0)]
    assert [each["first"] for each in found] == [0, 4, 8]
    losses = [loss for each in found for loss in each["losses"]]
    np.testing.assert_allclose(losses, alone[0]["losses"], rtol=2e-5)


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.filterwarnings("ignore:slices along")
@pytest.mark.parametrize("number", [2, 4])
@pytest.mark.parametrize("plans", [PLANS[:3], PLANS[3:]], ids=["first", "second"])
def test_any_processes_train_what_one_does(number, plans, tmp_path):
    assert_same(number, plans, tmp_path)
