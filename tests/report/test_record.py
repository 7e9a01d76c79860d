"""Lines are appended; failures warn once and stop nothing."""

import json
import os
import resource
import shutil
import subprocess
import sys

import numpy as np
import pytest

from pipemesh.errors import ReportError
from pipemesh.report import Record, read
from pipemesh.report.record import FILE, to_line
from pipemesh.schedule import one_f_one_b, simulate
from tests.report import records
from tests.report.records import made


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


def test_run_is_read_completely(tmp_path):
    run = made(tmp_path)
    assert (run.name, run.unit, run.step, run.state) == ("Tiny", "tokens", 300, "done, at step 300")
    assert [step for step, _ in run.train["loss"]] == list(range(1, 301))
    assert [step for step, _ in run.heldout["loss"]] == [50, 100, 150, 200, 250, 300]
    assert [step for step, _ in run.final["loss"]] == [300]
    assert run.pairs("begin", "flags")["plain"] == "false"
    assert run.resumed == [] and run.unread == 0


def test_resuming_discards_later_steps(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    for step in range(1, 8):
        record.add("step", step=step, loss=1.0, only_before=2.0)
    record.add("heldout", step=5, loss=9.0)
    record.add("skipped", step=6, why="of before")
    record.add("end", step=7, reason="killed")
    records.begin(record, step=5)
    run = read(str(tmp_path))
    assert run.step == 5 and run.resumed == [5] and not run.told["skipped"]
    assert run.state.startswith("no end is recorded: running, or killed, at step 5")
    record.add("step", step=6, loss=4.0)
    record.add("heldout", step=5, loss=3.0)
    run = read(str(tmp_path))
    assert run.train["loss"] == [*((step, 1.0) for step in range(1, 6)), (6, 4.0)]
    assert [step for step, _ in run.train["only_before"]] == [1, 2, 3, 4, 5]
    assert run.heldout["loss"] == [(5, 3.0)]
    # From the beginning, because nothing was saved.
    records.begin(record)
    assert read(str(tmp_path)).train == {}


def test_timelines_are_of_the_schedule_that_ran(tmp_path):
    records.whole(tmp_path)
    run = read(str(tmp_path))
    measured, predicted = run.measured(), run.predicted()
    assert measured.schedule == one_f_one_b(2, 4)
    assert measured.makespan > simulate(measured.schedule, measured.costs).makespan
    # In forward passes of a mean stage, 9.5e6 flops here.
    costs = predicted.costs.per_stage(2)
    assert sum(costs.forward) == pytest.approx(2)
    assert costs.backward == pytest.approx([2 * time for time in costs.forward])


BAD = [
    "no JSON",
    "[]",
    "{}",
    '{"event": 3, "step": 1}',
    '{"event": "step", "step": -1}',
    '{"event": "step", "step": true}',
    '{"event": "begin", "step": 0, "stages": [[["a", "b"], ["c"]]]}',
    '{"event": "begin", "step": 0, "stages": 3}',
    '{"event": "forecast", "step": 0, "devices": [{"device": "CPU:0"}]}',
    '{"event": "forecast", "step": 0, "sent": [3]}',
    '{"event": "forecast", "step": 0, "schedule": "0: 0F0 0B", "costs": {}}',
    '{"event": "measured", "step": 0, "peak_memory": "much"}',
    '{"event": "schedule", "step": 0, "schedule": "0: 0F0 0B0"}',
    '{"event": "schedule", "step": 0, "schedule": "0: 0F0 0B0", "starts": [[0, 1]], "ends": [[1]],'
    ' "costs": {"F": [1], "B": [1], "I": [1], "W": [1]}}',
    '{"event": "schedule", "step": 0, "schedule": "0: 0F0 0B0", "starts": [[0, 3]],'
    ' "ends": [[1, null]], "costs": {"F": [1], "B": [1], "I": [1], "W": [1]}}',
    '{"event": "workers", "step": 0}',
    '{"event": "workers", "step": 0, "workers": [{"worker": "worker 0", "seconds": "1"}]}',
    "\x00\x00",
]


@pytest.mark.parametrize("line", BAD)
def test_invalid_lines_are_counted_and_left_out(tmp_path, line):
    records.plain(tmp_path)
    before = read(str(tmp_path))
    with open(tmp_path / FILE, "a") as file:
        file.write(f"{line}\n")
    after = read(str(tmp_path))
    assert after.unread == 1
    assert (after.train, after.last) == (before.train, before.last)


def test_unfinished_last_line_is_ignored(tmp_path):
    records.plain(tmp_path)
    before = read(str(tmp_path))
    with open(tmp_path / FILE, "a") as file:
        file.write('{"event": "step", "step": 3')
    assert read(str(tmp_path)) == before


def test_only_numbers_are_curves(tmp_path):
    record = Record(str(tmp_path))
    record.add("step", step=1, loss=float("nan"), word="x", flag=True, more=[1])
    assert read(str(tmp_path)).train == {"loss": [(1, None)]}


def test_samples_are_read(tmp_path):
    records.plain(tmp_path)
    lines = [json.dumps({"prompt": "a", "text": "a b"}), "no JSON", '{"prompt": "c"}', "3", ""]
    (tmp_path / "samples.jsonl").write_text("\n".join(lines))
    run = read(str(tmp_path))
    assert run.samples == [("a", "a b")] and run.unread == 3


def test_folder_without_record_is_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / FILE).write_text("")
    (tmp_path / "odd" / FILE).mkdir(parents=True)
    for folder, told in (
        (tmp_path, f"'{tmp_path}' has no {FILE}; give the log directory of a run"),
        (tmp_path / "file", "is a file; give the log directory of a run"),
        (tmp_path / "none", "does not exist; give the log directory of a run"),
        (tmp_path / "new", "has no steps yet; wait for the first one"),
        (tmp_path / "odd", "cannot be read (Is a directory)"),
    ):
        with pytest.raises(ReportError) as error:
            read(str(folder))
        assert told in str(error.value) and "\n" not in str(error.value)


def test_all_timed_steps_are_read(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    table = one_f_one_b(2, 4)
    real = simulate(table)
    costs = real.costs.per_stage(2).durations()
    later = [[time + 1 for time in row] for row in real.ends]
    shown = {"schedule": table.to_text(), "costs": costs, "starts": real.starts, "ends": real.ends}
    record.add("schedule", **shown, seconds=1.0, others=[[real.starts, later]] * 2)
    run = read(str(tmp_path))
    assert [each.makespan for each in run.timed()] == [real.makespan, *[real.makespan + 1] * 2]
    assert run.timed()[0] == run.measured()
    # Times that go back are none.
    record.add("schedule", **shown, others=[[later, real.starts]])
    assert read(str(tmp_path)).unread == 1
    (tmp_path / "none").mkdir()
    assert read(str(records.plain(tmp_path / "none"))).timed() == []
