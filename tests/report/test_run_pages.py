"""The page of a run, and the page that compares several."""

import re

import pytest

from pipemesh.errors import ReportError
from pipemesh.report import Record, comparison, page, read
from pipemesh.report.run_pages import curves, curves_of, names_of
from tests.report import records
from tests.report.records import made, plain
from tests.report.test_html_page import Checked


def sections(text):
    return re.findall("<h2>(.*?)</h2>", text)


@pytest.mark.parametrize("make", [records.whole, records.plain, records.interrupted])
def test_pages_are_valid_and_load_nothing(tmp_path, make):
    text = page(made(tmp_path, make))
    Checked(text)
    assert "<script" not in text and "src=" not in text and "@import" not in text
    assert "url(" not in text
    # The name of SVG alone.
    assert set(re.findall(r"https?://[^'\"<> ]*", text)) <= {"http://www.w3.org/2000/svg"}


def test_page_of_pipeline_has_all_sections(tmp_path):
    (tmp_path / "samples.jsonl").write_text('{"prompt": "The", "text": "The <b>end"}\n')
    text = page(made(tmp_path))
    assert sections(text) == [
        *("Curves", "How it was run", "Predicted and measured", "What would help", "Schedule"),
        *("Memory", "Communication", "Samples", "What happened"),
    ]
    told = ("done, at step 300", "2 Block + Softmax", "<b>The</b> &lt;b&gt;end", "--learning_rate")
    assert all(words in text for words in (*told, f"{tmp_path}/ckpt-300", "1f1b"))


def test_page_of_plain_run_says_so(tmp_path):
    text = page(made(tmp_path, records.plain))
    assert sections(text) == ["Curves", "How it was run", "Memory", "What happened"]
    assert "Without a pipeline there are no stages." in text


def test_interruptions_are_shown(tmp_path):
    text = page(made(tmp_path, records.interrupted))
    for told in (
        *("stopped by SIGTERM, at step 220", "resumes from runs/a/ckpt-100", "1, left out here"),
        *("skipped: a gradient is not finite", "the loss is 9.000, after 3.100 on average"),
        "resumed at step 100",
    ):
        assert told in text


def test_many_skipped_steps_are_counted(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    for step in range(1, 100):
        record.add("skipped", step=step, why="not finite")
    text = page(read(str(tmp_path)))
    assert text.count("skipped: not finite") == 20 and "Left out: 79 lines." in text


def test_one_line_makes_a_page(tmp_path):
    records.begin(Record(str(tmp_path)))
    text = page(read(str(tmp_path)))
    assert "no end is recorded" in text and "Curves" not in text


def titles(figures):
    return [re.search("<title>(.*?)</title>", text)[1] for text in figures]


def test_loss_comes_first_and_speed_last(tmp_path):
    pictures = list(curves(made(tmp_path)))
    # Training and evaluations share a picture.
    for name in ("training", "held out", "held out, at the end"):
        assert f"; {name}: " in pictures[0] or f": {name}: " in pictures[0]
    # Twelve steps of training, six of held-out data, all of which training has or has not.
    assert 13 <= pictures[0].count("<tr>") <= 1 + 12 + 6 + 1
    found = titles(pictures)
    assert found[0] == "loss" and found[-3:] == ["learning rate", "tokens per second", "MFU"]
    assert {"bits per byte", "token perplexity"} == set(found[1:-3])


def test_values_without_numbers_have_no_picture(tmp_path):
    record = Record(str(tmp_path))
    record.add("step", step=1, loss=1.0, accuracy=float("nan"))
    assert names_of([read(str(tmp_path))]) == ["loss"]


def test_curves_of_runs_share_one_scale(tmp_path):
    runs = [made(tmp_path / "a", level=1.0), made(tmp_path / "b", level=9.0)]
    figures = list(curves_of(runs, ["a", "b"]))
    assert titles(figures)[:2] == ["loss, training", "loss, held out"]
    axes = [re.findall(r"dominant-baseline='central'[^>]*>(.*?)</text>", f) for f in figures[:2]]
    assert axes[0] == axes[1] != []


def test_final_evaluation_of_runs_is_a_ring(tmp_path):
    """Only where no run was judged while training was it to be seen."""
    runs = [made(tmp_path / "a"), made(tmp_path / "b", records.plain)]
    loss = list(curves_of(runs, ["a", "b"]))[1]
    assert titles([loss]) == ["loss, held out"]
    assert "a, at the end, step 300: 3.1</title></circle>" in loss
    assert "b, at the end, step 30: 4.5</title></circle>" in loss
    # The colour of a line says which run a ring is of.
    legend = re.findall(r" y='41'[^>]*>(.*?)</text>", loss)
    assert legend == ["a", "b, at the end"] and "Rings: the evaluation at the end." in loss


def test_comparison_shows_results_and_differences(tmp_path):
    one = made(tmp_path / "one")
    two = made(tmp_path / "two", level=2.5, timed=False, flags={"steps": 300, "seed": 3})
    text = comparison([one, two])
    Checked(text)
    for row in (
        "<td class=left>loss, held out, at the end</td><td>3.1 (step 300)</td><td>2.6 (step 300)",
        "<td class=left>--learning_rate</td><td class=left>0.1</td><td class=left>not given</td>",
        "<td class=left>--seed</td><td class=left>not given</td><td class=left>3</td>",
        "<td class=left>makespan and bubble, measured</td><td>163.6 ms, 24.2%</td><td></td>",
    ):
        assert row in text
    assert "--steps" not in text
    assert re.search("loss, training: one: [67][.].* at step 1,.*; two: [67][.]", text)


def test_only_differences_of_settings_are_listed(tmp_path):
    one = made(tmp_path / "one")
    text = comparison([one, made(tmp_path / "two", seed=1)])
    assert "Plan, flags and versions are the same." in text
    two = made(tmp_path / "three", plan={"mesh": "layers:4"}, versions={"pipemesh": "0.2"})
    text = comparison([one, two])
    for told in ("plan: mesh</td>", "plan: schedule</td>", "version of pipemesh</td>"):
        assert f"<td class=left>{told}" in text


def test_equal_folder_names_are_told_apart(tmp_path):
    runs = [made(tmp_path / name / "run") for name in ("a", "b")]
    assert "Comparison of a/run, b/run" in comparison(runs)
    assert "Comparison of run (1), run (2)" in comparison([runs[0], runs[0]])


def test_number_of_compared_runs_is_limited(tmp_path):
    runs = [made(tmp_path / "one")] * 7
    for few in ([], runs[:1], runs):
        with pytest.raises(ReportError, match=f"^{len(few)} runs cannot be compared; give 2 to 6$"):
            comparison(few)
    assert "loss, held out, at the end" in comparison([*runs[:5], made(tmp_path / "b", plain)])
