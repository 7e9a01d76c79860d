"""Checkpoints of what lies on workers: each writes and reads what it has."""

import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import subprocess
import time

import pytest

from pipemesh.checkpoint import newest_whole
from tests.hosts.saved import BYTES
from tests.hosts.workers import COMMAND, address_of, started
from tests.warm import warm


@pytest.fixture(scope="module")
def workers():
    with started(2) as (_, addresses):
        yield addresses


def run(addresses, folder, task):
    os.makedirs(folder, exist_ok=True)
    command = warm("-m", "tests.hosts.saved", ",".join(addresses), str(folder), task)
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    said = "\n".join(line for line in done.stderr.splitlines() if str(folder) in line)
    return json.loads(done.stdout.splitlines()[-1]), said


def data_files(folder, step):
    return len(list(pathlib.Path(folder).glob(f"ckpt-{step}.data-*")))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_each_host_writes_and_reads_its_slices(workers, tmp_path):
    """Next to nothing of it goes through the client, and it is what the client would write."""
    found, said = run(workers, tmp_path, "save")
    assert not said
    first, second, by_client = found["carried"]
    assert by_client > BYTES
    # The first has to send names, and graphs.
    assert first < BYTES / 100 and second < BYTES / 500
    assert found["restored"] < BYTES / 100
    assert [data_files(tmp_path, step) for step in (1, 2, 3)] == [3, 3, 1]
    # The newest is that of the client; then that of workers, which `save` has restored on them.
    for hosts in (workers, []):
        assert run(hosts, tmp_path, "restore")[0]["values"] == found["values"]
    for file in tmp_path.glob("ckpt-3.*"):
        file.unlink()
    for hosts in (workers[:1], workers[::-1], []):
        assert run(hosts, tmp_path, "restore") == ({"values": found["values"]}, "")


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_training_on_workers_goes_on_while_they_write_and_if_one_cannot(workers, tmp_path):
    """The saved values are those of `begin`, whatever steps follow while workers write."""
    found, said = run(workers, tmp_path, "beside")
    assert found["kept"] and found["moved"]
    assert not said
    assert re.search(r"ckpt-5 cannot be written \(worker 1: .*/proc/", found["error"])
    assert found["newest"].endswith("ckpt-6")


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_client_leaves_a_whole_checkpoint(workers, tmp_path):
    before = 0
    for instant in random.Random(1).choices(range(300), k=2):
        command = warm("-m", "tests.hosts.saved", ",".join(workers), str(tmp_path), "endless")
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            begun = json.loads(process.stdout.readline())
            assert begun["step"] >= before
            # All of it is of one step.
            assert begun["values"] == [float(begun["step"])]
            # One checkpoint is whole when the next but one begins; a busy machine takes its time.
            for _ in range(3):
                process.stdout.readline()
            time.sleep(instant / 1000)
        finally:
            process.kill()
            process.communicate()
        found = newest_whole(str(tmp_path))
        before = found[1].step if found else 0
    assert before > 1


@contextlib.contextmanager
def apart(folder):
    """A worker on a machine of its own, as far as files are concerned."""
    hide = f"mount -t tmpfs none {folder} && exec {' '.join(COMMAND)} --port=0"
    words = ["unshare", "-m", "sh", "-c", hide]
    worker = subprocess.Popen(words, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield address_of(worker)
    finally:
        worker.kill()
        worker.communicate()


def may_mount():
    words = ["unshare", "-m", "sh", "-c", "mount -t tmpfs none /mnt"]
    return (
        bool(shutil.which("unshare"))
        and not subprocess.run(words, capture_output=True, check=False).returncode
    )


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.skipif(not may_mount(), reason="this user may not give a process files of its own")
def test_the_client_writes_for_workers_without_the_folder(workers, tmp_path):
    with apart(tmp_path) as other:
        hosts = [workers[0], other]
        found, said = run(hosts, tmp_path, "save")
        assert f"{tmp_path}: worker 1 does not see it; this process writes for it" in said
        assert re.search(r"ckpt-2: worker 1 does not see it; this process reads for it", said)
        assert "worker 0" not in said
        # What worker 1 has, and no more.
        assert BYTES / 2 < found["carried"][1] < 0.6 * BYTES < BYTES < found["carried"][2]
        assert data_files(tmp_path, 2) == 2
    assert run([], tmp_path, "restore")[0]["values"] == found["values"]
