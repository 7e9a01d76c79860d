"""Predicted beside measured, and the one change that is named."""

import html
import re

import pytest

from pipemesh.plan import Plan, Prediction, predict
from pipemesh.report import Record, page, read
from pipemesh.report.forecast import _shown, advice, forecast, sentence
from pipemesh.report.plan_changes import Change
from tests.report import records
from tests.report.records import made

KNOWN = ("rows", "layers", "predicted")


def cells(text):
    """The rows of all tables, by what they begin with."""
    rows = re.findall(r"<tr>(.*?)</tr>", text, re.DOTALL)
    found = [re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row) for row in rows]
    return {html.unescape(row[0]): [html.unescape(c) for c in row[1:]] for row in found}


def test_predicted_and_measured_parts_add_up(tmp_path):
    run = made(tmp_path, told=KNOWN, peak_memory=200 << 20)
    rows = cells("\n".join(forecast(run)))
    plan = Plan("layers:2", num_microbatches=4, remat="none")
    ahead = predict(plan, records.figures(), 16)
    assert rows["milliseconds"][:3] == ["predicted", "measured", "difference"]
    whole = "total, the timed step"
    parts = list(rows)[1 : list(rows).index(whole)]
    assert "collectives" not in parts
    for column, total in ((0, 1e3 * ahead.seconds), (1, records.TIMED)):
        known = [float(rows[name][column]) for name in parts if rows[name][column] != "not known"]
        assert float(rows[whole][column]) == pytest.approx(total, rel=1e-3)
        assert sum(known) == pytest.approx(total, rel=1e-2)
    for name in ("work", "filling and draining", whole):
        predicted, measured, difference = map(float, rows[name][:3])
        assert difference == pytest.approx(measured - predicted, abs=0.2)
    # What nobody predicted is not 0.
    assert rows["variation"][0] == "not known" and rows["variation"][2] == ""
    assert float(rows["median step"][1]) == pytest.approx(180, rel=0.05)

    assert rows["the fullest device"] == [
        *(f"{max(ahead.memory) / 2**20:.1f} MiB", "23.8 MiB", "not known")
    ]
    # Devices of a CPU have no memory of their own.
    assert rows["all devices"][2] == "not known"
    # The begin, and gradients and activations of both devices.
    counted = 200 + (4e6 + 9e6 + 4e6 + 5e6) / 2**20
    assert rows["the process"] == ["not known", f"{counted:.1f} MiB", "300.0 MiB"]
    rows = cells("\n".join(forecast(made(tmp_path / "no beginning", told=KNOWN))))
    assert rows["the process"] == ["not known", "not known", "300.0 MiB"]


def test_all_gpus_are_measured(tmp_path):
    record = Record(str(tmp_path))
    records.begin(record)
    state = {"weights": 4e6, "optimizer": 8e6, "gradients": 4e6, "activations": 9e6}
    record.add("forecast", devices=[{"device": f"GPU:{n}", **state} for n in range(2)])
    record.add("measured", peak_memory=50 << 20)
    rows = cells("\n".join(forecast(read(str(tmp_path)))))
    assert rows["all devices"] == ["not known", "47.7 MiB", "50.0 MiB"]
    assert "the process" not in rows


def test_without_figures_shares_are_compared(tmp_path):
    text = "\n".join(forecast(made(tmp_path, told=("rows", "layers"))))
    assert "Seconds were not predicted: nothing was measured." in text
    assert "Shares are compared here and not seconds" in text
    rows = cells(text)
    assert rows["share of the pipeline's time"][0] == "predicted"
    shares = [float(rows[n][0].rstrip("%")) for n in ("work", "filling and draining", "imbalance")]
    assert sum(shares) == pytest.approx(100, abs=0.2)
    assert rows["transfers"][0] == "not known" and rows["transfers"][2] == ""
    assert "milliseconds" not in rows


def test_without_timed_step_only_totals_are_compared(tmp_path):
    run = made(tmp_path, told=KNOWN, timed=False)
    rows = cells("\n".join(forecast(run)))
    assert rows["work"][1] == "not known"
    assert float(rows["median step"][1]) == pytest.approx(180, rel=0.05)
    assert list(advice(run)) == []


def test_best_change_is_named_with_flags_and_runners_up(tmp_path):
    text = "\n".join(advice(made(tmp_path, told=("rows", "layers"))))
    named = re.search(r"would help most: <b>(.*?)</b>. It saves (.*?)% of a step", text)
    assert named, text
    flags = re.findall(r"<td class=left>([^<]*)</td>", text)
    assert re.sub("<.*?>", "", named[1]) in flags and float(named[2]) > 2
    assert f"({records.TIMED:.4g} ms)" in text and "none was run" in text
    assert "The memory of a device is not known" in text
    assert "at most four times as many were tried" in text


def test_changes_above_device_memory_are_left_out(tmp_path):
    text = "\n".join(advice(made(tmp_path / "a", told=("rows", "layers", "limit"))))
    assert "Changes that need more than 22.9 MiB per device are left out." in text
    text = "\n".join(advice(made(tmp_path / "b", told=("rows", "limit"))))
    assert "The memory of layers is not known, so none was left out for its memory." in text
    assert "no stage was cut again" in text


def test_page_says_if_nothing_helps():
    plan = Plan("layers:1", num_microbatches=4)

    def change(seconds, supposed=""):
        values = {"num_microbatches": "8"}
        return Change("microbatches", values, Prediction(seconds, 0.0, (1.0,), plan=plan), supposed)

    assert "No change that was tried" in sentence([change(0.99)], 1.0)
    assert "saves 1.0%." in sentence([change(0.99)], 1.0)
    assert "saves -5.0%." in sentence([change(1.05)], 1.0)
    assert "It saves 3.0% of a step (970 ms instead of 1000 ms)" in sentence([change(0.97)], 1.0)
    # What rests on more than measurements has to help by more.
    (less, more) = (sentence([change(each, "rows are alike")], 1.0) for each in (0.96, 0.94))
    assert "saves more than 5% of a step" in less and "saves 4.0%, if rows are alike" in less
    assert "would help most" in more and more.endswith(", if rows are alike.")
    assert "nothing to change" in sentence([], 1.0)


def test_the_best_change_of_each_kind_is_shown():
    kinds = [("remat", 0.8), ("remat", 0.9), ("cuts", 1.2), ("cuts", 1.3)]
    plan = Plan("layers:2", num_microbatches=2)
    changes = [
        Change(kind, {}, Prediction(seconds, 0.0, (1.0,), plan=plan)) for kind, seconds in kinds
    ]
    assert [change.prediction.seconds for change in _shown(changes, 1.0)] == [0.8, 0.9, 1.2]


def test_page_says_why_no_change_is_known(tmp_path):
    (text,) = advice(made(tmp_path / "a", told=()))
    assert "is not known: the record does not say how large a batch is" in text
    run = made(tmp_path / "b", records.plain)
    assert list(forecast(run)) == [] and list(advice(run)) == []


@pytest.mark.parametrize(
    "spoiled",
    [
        {"predicted": {"seconds": 1.0}},
        {"predicted": []},
        {"cuts": "abc"},
        {"layers": [{"flops": 1.0}]},
        {"rows": "many"},
        {"figures": {"layers": []}, "rows": 16, "cuts": [0, 1, 2]},
    ],
)
def test_malformed_forecast_does_not_end_the_page(tmp_path, spoiled):
    record = Record(str(tmp_path))
    records.begin(record)
    record.add("forecast", **spoiled)
    records.schedule(record)
    text = page(read(str(tmp_path)))
    assert "is not known" in text or "cannot be read" in text
