"""Training on workers equals training in one process, bit for bit."""

import functools
import json
import subprocess

import pytest

from tests.hosts.workers import started
from tests.warm import warm

SPLIT = "heads:model;d_ff:model;vocab:model"
PLANS = [
    "mesh=layers:2 num_microbatches=4",
    "mesh=layers:4 num_microbatches=4",
    "mesh=layers:2;data:2 layout=batch:data num_microbatches=4",
    f"mesh=layers:2;model:2 layout={SPLIT} num_microbatches=4",
    "mesh=layers:1;data:2 layout=batch:data num_microbatches=4",
    f"mesh=layers:1;model:2 layout={SPLIT} num_microbatches=4",
    f"mesh=layers:1;data:2;model:2 layout=batch:data;{SPLIT} num_microbatches=4",
]
SIMD = "num_microbatches=4 lowering=simd schedule"
# As one program for all devices: one client drives all workers, whatever the lowering.
PROGRAMS = [
    f"mesh=layers:2 layout=vocab:layers {SIMD}=gpipe",
    f"mesh=layers:1;data:2 layout=batch:data {SIMD}=gpipe",
    f"mesh=layers:1;model:2 layout={SPLIT} {SIMD}=gpipe",
    f"mesh=layers:2;data:2 layout=batch:data {SIMD}=gpipe",
    f"mesh=layers:2;model:2 layout={SPLIT} {SIMD}=looped_bfs:2",
    f"mesh=layers:1;data:2;model:2 layout=batch:data;{SPLIT} {SIMD}=gpipe",
    f"mesh=layers:4 layout=vocab:layers {SIMD}=gpipe",
    f"mesh=layers:1;model:4 layout=d_ff:model;vocab:model {SIMD}=gpipe",
    f"mesh=layers:1;data:4 layout=batch:data {SIMD}=gpipe",
]
STEPS = 3


@pytest.fixture(scope="module", params=[2])
def workers(request):
    with started(request.param, "--cpu_devices=2") as (_, addresses):
        yield addresses


def trained(addresses, plans):
    command = warm("-m", "tests.hosts.trained", ",".join(addresses), str(STEPS), *plans)
    done = subprocess.run(command, capture_output=True, text=True, timeout=580, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == len(plans)
    return found


@functools.cache
def trained_alone(*plans):
    return trained([], plans)


def assert_same(plans, together, number):
    for plan, one, other in zip(plans, trained_alone(*plans), together, strict=True):
        assert one["losses"] == other["losses"], plan
        assert len(set(one["losses"])) == STEPS
        assert one["weights"] == other["weights"], plan
        assert (one["workers"], other["workers"]) == (0, number)
        tasks = {device.split("/")[3] for device in other["devices"]}
        assert len(tasks) == min(number, len(other["devices"])), plan


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_workers_equal_one_process(workers):
    """Activations and gradients of the wide model are 256 KiB a step: they go from worker to
    worker, and the client sends a batch and gets a loss.
    """
    plans = [f"wide {PLANS[0]}".replace("batches=4", "batches=2"), PROGRAMS[3]]
    together = trained(workers, plans)
    assert_same(plans, together, 2)
    handed_on = 2 * 8 * 16 * 256 * 4
    assert 0 < together[0]["bytes"] < handed_on / 4


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [2, 4], indirect=True)
@pytest.mark.parametrize(
    "plans",
    [PLANS[:2], PLANS[2:4], PLANS[4:6], PLANS[6:], PROGRAMS[:3], PROGRAMS[3:6], PROGRAMS[6:]],
)
def test_any_workers_equal_one_process(workers, plans):
    assert_same(plans, trained(workers, plans), len(workers))
