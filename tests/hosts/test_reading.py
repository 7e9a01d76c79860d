"""Data that workers read: the same batches as in one process, resumed exactly."""

import gzip
import json
import subprocess

import pytest

from tests.hosts.reading import LINES
from tests.hosts.workers import started
from tests.warm import warm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def test_a_worker_reads_what_one_process_reads(tmp_path):
    """Plain and packed text, and documents, also by a relative path. A position that the worker
    saved is taken up there and here; what a worker cannot read is refused by name.
    """
    (tmp_path / "a.txt").write_text("\n".join(LINES[:120]))
    (tmp_path / "b.txt").write_bytes(gzip.compress("\n".join(LINES[120:]).encode()))
    (tmp_path / "heldout").write_text("something else\n")
    rows = [json.dumps({"ids": [1 + n % 90] * (3 + n % 9)}) for n in range(40)]
    (tmp_path / "ids.jsonl").write_text("\n".join(rows))
    with started(1) as (_, (address,)):
        command = warm("-m", "tests.hosts.reading", address, str(tmp_path))
        done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["read"].keys() == {"text files", "documents", "buckets", "relative"}
    for name, read in found["read"].items():
        assert set(read.pop("on").values()) == {found["worker"]}, name
        assert read == dict.fromkeys(("batches", "there again", "resumed here"), True), name
    trained = found["trained"]
    assert set(trained["on"]) == {found["worker"]}
    assert trained["carried"] < trained["batch"] / 4
    assert trained["losses"] == sorted(trained["losses"], reverse=True)
    refused = found["refused"]
    assert "differs from where training was started" in refused["other_files"]
    assert "Python function that cannot be sent to a worker" in refused["nobody_elsewhere"]
    assert all("the worker on" in text for text in refused.values())
    positions = found["positions"]
    assert (positions["restorable"], positions["sparse"]) == ([False, False], found["worker"])
    assert len(positions["misfits"]) == 2
    assert all("is a position in another dataset" in text for text in positions["misfits"])
    assert found["foreign"] == [True, False, False]
