"""The page of a run."""

import re

import pytest

from pipemesh.report import Record, page, read
from tests.report import records
from tests.report.test_markup import Checked


def sections(text):
    return re.findall("<h2>(.*?)</h2>", text)


@pytest.mark.parametrize("make", [records.whole, records.plain, records.interrupted])
def test_pages_are_sound_and_need_no_network(tmp_path, make):
    text = page(read(str(make(tmp_path))))
    Checked(text)
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert "url(" not in text
    # The name of SVG alone.
    assert set(re.findall(r"https?://[^'\"<> ]*", text)) <= {"http://www.w3.org/2000/svg"}


def test_a_run_with_a_pipeline_has_all_of_it(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"prompt": "The", "text": "The <b>end"}\n')
    text = page(read(str(records.whole(tmp_path))))
    expected = [
        "Curves",
        "How it was run",
        "Predicted and measured",
        "What would help",
        "Schedule",
        "Memory",
        "Communication",
        "Samples",
    ]
    assert sections(text) == [*expected, "What happened"]
    for told in (
        "done, at step 300",
        "2 Block + Softmax",
        "<b>The</b> &lt;b&gt;end",
        "--learning_rate",
        f"{tmp_path}/ckpt-300",
        "1f1b",
    ):
        assert told in text


def test_a_run_without_a_pipeline_says_so(tmp_path):
    text = page(read(str(records.plain(tmp_path))))
    assert sections(text) == ["Curves", "How it was run", "Memory", "What happened"]
    assert "Without a pipeline there are no stages." in text


def test_interruptions_are_told(tmp_path):
    text = page(read(str(records.interrupted(tmp_path))))
    for told in (
        "stopped by SIGTERM, at step 220",
        "goes on from runs/a/ckpt-100",
        "skipped: a gradient is not finite",
        "the loss is 9.000, after 3.100 on average",
        "1, left out here",
        "resumed at step 100",
    ):
        assert told in text


def test_many_skipped_steps_are_counted(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    for step in range(1, 100):
        record.add("skipped", step=step, why="not finite")
    text = page(read(str(tmp_path)))
    assert text.count("skipped: not finite") == 20 and "Left out here: 79 lines." in text


def test_the_first_line_of_a_record_is_enough(tmp_path):
    records.begin(Record(str(tmp_path)))
    text = page(read(str(tmp_path)))
    assert "no end is recorded" in text and "Curves" not in text
