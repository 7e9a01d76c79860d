"""Sections of a page on the pipeline."""

from pipemesh.report import Record, read
from pipemesh.report.pipeline import communication, memory, schedule, workers
from tests.report import records
from tests.report.records import made


def test_timed_step_is_drawn_twice_and_explained(tmp_path):
    run = made(tmp_path)
    text = "\n".join(schedule(run))
    assert text.count("<rect class='cell' ") == 2 * 16
    for name in ("work", "filling and draining", "imbalance", "variation", "overhead", "transfers"):
        assert f"<td class=left>{name}</td>" in text
    assert "<td>1.0 MiB</td>" in communication(run)
    text = "\n".join(memory(run))
    for told in ("CPU:0: 23.8 MiB", "CPU:1: 20.0 MiB", "all, predicted: 43.9 MiB"):
        assert told in text
    # Seven times as much would hide them.
    assert "all, measured" not in text and "the process used at most 300.0 MiB" in text


def test_untimed_step_is_drawn_as_predicted(tmp_path):
    text = "\n".join(schedule(made(tmp_path, timed=False)))
    assert text.count("<rect class='cell' ") == 16 and "--trace_schedule" in text
    assert "Where the difference" not in text


def test_measured_memory_is_drawn_beside_forecast(tmp_path):
    record = Record(str(tmp_path))
    records.forecast(record)
    record.add("step", step=1, loss=1.0)
    record.add("measured", peak_memory=50 << 20)
    assert "all, measured: 50.0 MiB" in "\n".join(memory(read(str(tmp_path))))


def test_plain_run_has_no_pipeline_sections(tmp_path):
    run = made(tmp_path, records.plain)
    assert list(schedule(run)) == [] and communication(run) == ""
    (told,) = memory(run)
    assert "Peak: 200.0 MiB; nothing was predicted." in told


def test_slow_workers_are_named(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    found = {"worker": "worker 0 (a:1, stage 0)", "seconds": 0.1, "times": 0.4, "is_slow": False}
    other = {"worker": "worker 1 (b:1, stage 1)", "seconds": 0.5, "times": 2.5, "is_slow": True}
    record.add("workers", step=100, workers=[found, other])
    told = "\n".join(workers(read(str(tmp_path))))
    assert "Slow: worker 1 (b:1, stage 1)." in told
    assert "2.50" in told
    record.add("workers", step=200, workers=[{**found, "times": None}])
    assert "Slow" not in "\n".join(workers(read(str(tmp_path))))
