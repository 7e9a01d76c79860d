"""Several runs side by side."""

import re

import pytest

from pipemesh.errors import ReportError
from pipemesh.report import comparison, read
from tests.report import records
from tests.report.test_markup import Checked


def run(folder, make=records.whole, **changes):
    folder.mkdir(parents=True)
    return read(str(make(folder, **changes)))


def test_results_stand_beside_each_other_and_what_differs_is_told(tmp_path):
    one = run(tmp_path / "one")
    two = run(tmp_path / "two", level=2.5, timed=False, flags={"steps": 300, "seed": 3})
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


def test_runs_that_are_asked_for_alike_differ_in_nothing(tmp_path):
    text = comparison([run(tmp_path / "one"), run(tmp_path / "two", seed=1)])
    assert "Plan, flags and versions are the same." in text


def test_plans_and_versions_are_compared(tmp_path):
    one = run(tmp_path / "one")
    two = run(tmp_path / "two", plan={"mesh": "layers:4"}, versions={"pipemesh": "0.2"})
    text = comparison([one, two])
    for told in ("plan: mesh</td>", "plan: schedule</td>", "version of pipemesh</td>"):
        assert f"<td class=left>{told}" in text


def test_a_run_without_a_pipeline_beside_one_with(tmp_path):
    runs = [run(tmp_path / "one"), run(tmp_path / "two", records.plain)]
    assert "loss, held out, at the end" in comparison(runs)


def test_folders_of_one_name_are_told_apart(tmp_path):
    runs = [run(tmp_path / name / "run") for name in ("a", "b")]
    assert "Comparison of a/run, b/run" in comparison(runs)
    assert "Comparison of run (1), run (2)" in comparison([runs[0], runs[0]])


def test_so_many_cannot_be_told_apart(tmp_path):
    runs = [run(tmp_path / "one")] * 7
    for few in ([], runs[:1], runs):
        with pytest.raises(ReportError, match=f"^{len(few)} runs cannot be compared; give 2 to 6$"):
            comparison(few)
    comparison(runs[:6])
