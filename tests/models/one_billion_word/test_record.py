"""The record of a language model: what is known of it before the first step, and its scores."""

import json

import pytest

from pipemesh.plan import Plan
from pipemesh.report import page, read
from pipemesh.training.trainer import Trainer
from tests.models.one_billion_word.small_training import scalars, small_request


def test_what_is_predicted_and_what_is_scored_is_recorded(
    folder, tmp_path, train, monkeypatch, capsys
):
    reports = []
    real = Trainer._note_run

    def note_run(self, stack, run):
        real(self, stack, run)
        reports.append(self.report)

    monkeypatch.setattr(Trainer, "_note_run", note_run)
    plan = Plan("layers:2", num_microbatches=2, schedule="1f1b")
    request = small_request(tmp_path, folder, steps=4, plan=plan, eval_every=2, NUM_LAYERS=2)
    assert train(request) == 0
    run, (report,) = read(str(tmp_path)), reports
    assert run.name == "OneBillionWordTiny" and run.unit == "tokens"
    assert run.pairs("begin", "plan") == plan.to_values()
    ((head, *rows),) = run.table("begin", "stages")
    assert head[:2] == ["stage", "layers"] and [row[0] for row in rows] == ["0", "1"]
    devices = run.table("forecast", "devices")
    assert [each["device"] for each in devices] == [each.device for each in report.memory]
    for told, held in zip(devices, report.memory, strict=True):
        assert told["activations"] == held.kept and told["weights"] == held.weights
        assert told["optimizer"] == report.optimizer[held.device]
    assert sum(each["bytes"] for each in run.table("forecast", "sent")) == sum(
        each.bytes for each in report.sent
    )
    assert run.fact("forecast", "flops") == report.flops
    predicted = run.predicted()
    assert predicted.bubble_ratio == pytest.approx(report.bubble)
    assert predicted.schedule == report.timeline.schedule
    # The same numbers as in TensorBoard, which has them as float32.
    for name in ("loss", "bits_per_byte", "token_perplexity"):
        values = [value for _, value in run.train[name]]
        assert values == pytest.approx(scalars(tmp_path, name), rel=1e-6)
        heldout = [run.heldout[name][0][1], run.final[name][0][1]]
        assert heldout == pytest.approx(scalars(tmp_path, name, "heldout"), rel=1e-6)
    text = (tmp_path / "report.html").read_text()
    assert text == page(run)
    for told in ("word perplexity", "Memory by device", "predicted by flops", "activations"):
        assert told in text
    lines = (tmp_path / "record.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines].count("step") == 4
