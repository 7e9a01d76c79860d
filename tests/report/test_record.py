"""Lines are appended; failures warn once and stop nothing."""

import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pipemesh.report.record import FILE, Record, to_line


def lines(folder):
    return [json.loads(line) for line in (folder / FILE).read_text().splitlines()]


def test_every_line_has_event_step_and_time(tmp_path):
    record = Record(str(tmp_path))
    record.add("step", step=3, loss=np.float32(0.5))
    line = record.add("heldout", loss=1.5)
    assert json.loads(line) == lines(tmp_path)[1]
    first, second = lines(tmp_path)
    assert (first["event"], first["step"], first["loss"]) == ("step", 3, 0.5)
    assert (second["event"], second["step"]) == ("heldout", 3)
    assert first["time"] <= second["time"]


def test_lines_are_json():
    values = {
        "a": float("inf"),
        "b": (np.int64(2), np.float64("nan")),
        "c": {"d": None, 3: True},
        "e": np.dtype("float32"),
        "f": "ü\n",
    }
    told = json.loads(to_line("x", values), parse_constant=lambda name: pytest.fail(name))
    assert told == {
        "event": "x",
        "a": None,
        "b": [2, None],
        "c": {"d": None, "3": True},
        "e": "float32",
        "f": "ü\n",
    }


def test_cut_line_is_ended_before_the_next(tmp_path):
    (tmp_path / FILE).write_text('{"event": "step", "st')
    Record(str(tmp_path)).add("begin", step=0)
    cut, whole = (tmp_path / FILE).read_text().splitlines()
    assert cut == '{"event": "step", "st'
    assert json.loads(whole)["event"] == "begin"


def test_missing_folder_warns_once_and_is_retried(tmp_path):
    folder, told = tmp_path / "run", []
    record = Record(str(folder), told.append)
    for step in range(1, 50):
        record.add("step", step=step)
    folder.mkdir()
    for step in range(50, 151):
        record.add("step", step=step)
    assert told == [
        f"{folder}/{FILE} cannot be written (No such file or directory); training goes on"
    ]
    assert [line["step"] for line in lines(folder)] == list(range(101, 151))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_warns_once(tmp_path):
    (tmp_path / FILE).symlink_to("/dev/full")
    told = []
    record = Record(str(tmp_path), told.append)
    for step in range(300):
        record.add("step", step=step)
    assert told == [
        f"{tmp_path}/{FILE} cannot be written (No space left on device); training goes on"
    ]


def test_pipe_without_reader_does_not_block(tmp_path):
    os.mkfifo(tmp_path / FILE)
    told = []
    Record(str(tmp_path), told.append).add("begin", step=0)
    assert len(told) <= 1


# A limit on the size of files stands for a disk that fills up.
FILLS_UP = f"""
import resource, signal, sys
from pipemesh.report import Record
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200, {resource.RLIM_INFINITY}))
record = Record(sys.argv[1], lambda line: print("told"))
for step in range(10):
    record.add("step", step=step, text="x" * 30)
resource.setrlimit(resource.RLIMIT_FSIZE, ({resource.RLIM_INFINITY},) * 2)
for step in range(200, 210):
    record.add("step", step=step)
"""


def test_full_disk_in_mid_line_costs_one_line(tmp_path):
    code = [sys.executable, "-c", FILLS_UP, str(tmp_path)]
    done = subprocess.run(code, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "told\n"
    found = (tmp_path / FILE).read_text().splitlines()
    broken = [line for line in found if not line.endswith("}")]
    assert len(broken) == 1
    steps = [json.loads(line)["step"] for line in found if line not in broken]
    assert steps[-10:] == list(range(200, 210)) and steps[0] == 0


def test_removed_record_starts_again_in_a_new_folder(tmp_path):
    """Later lines went into a deleted file, without a warning."""
    folder, told, renewed = tmp_path / "run", [], []
    folder.mkdir()
    record = Record(str(folder), told.append, lambda: renewed.append(folder.stat()))
    begin = record.add("begin", step=0)
    shutil.rmtree(folder)
    record.add("step", step=1)
    assert told == [
        f"{folder / FILE} cannot be written (No such file or directory); training goes on"
    ]
    folder.mkdir()
    record.add("step", step=101)
    assert told[1:] == [f"{folder / FILE} was removed; later events go into a new one"] and renewed
    assert [line["event"] for line in lines(folder)] == ["begin", "step"]
    assert (folder / FILE).read_text().startswith(begin)
    # What another training has begun there since is left alone.
    (folder / FILE).unlink()
    (folder / FILE).write_text("of another one")
    record.add("step", step=102)
    assert (folder / FILE).read_text() == "of another one"
