"""The note of a checkpoint, the record of a run, and scores."""

import dataclasses
import json
import math

import numpy as np
import pytest

from models.one_billion_word import metrics
from models.one_billion_word.about import About, digests
from models.one_billion_word.corpus import Corpus, Sentences
from models.one_billion_word.metrics import Score
from models.one_billion_word.sizes import Tiny
from pipemesh.errors import CheckpointError
from pipemesh.plan import Plan
from pipemesh.report import page, read
from pipemesh.training.trainer import Trainer
from tests.models.one_billion_word.small_training import scalars, small_request


@pytest.fixture
def about(vocabulary):
    return About.of("Tiny", Tiny(), "CPU", {"train": "a", "heldout": "b"}, vocabulary)


def test_it_is_noted_as_json_and_read_as_it_was(about):
    assert About.from_note(json.loads(json.dumps(about.to_note()))) == about


@pytest.mark.parametrize("change", [{"vocabulary": None}, {"vocabulary": "abc"}, {"more": 1}, None])
def test_what_another_program_has_noted_is_told_in_a_line(about, change):
    """A log directory of another program ended in a traceback."""
    note = {"by": "me"} if change is None else about.to_note() | change
    with pytest.raises(CheckpointError, match=r"--logdir has checkpoints of another program, .*;"):
        About.from_note(note)


def test_another_model_is_refused_and_other_settings_are_listed(about, vocabulary):
    other = Tiny()
    other.BATCH_SIZE, other.SEED = 8, 3
    other.PLAN = Plan("layers:4", num_microbatches=8, compute_dtype="bfloat16")
    with pytest.raises(CheckpointError, match=r"another model \(seed 0 -> 3\)"):
        about.check_model("Tiny", other, "runs")
    now = About.of("Tiny", other, "CPU", about.data, vocabulary)
    assert about.changes(now) == (
        "mesh layers:2 -> layers:4, compute_dtype none -> bfloat16, batch_size 16 -> 8"
    )


def test_what_was_chosen_is_kept_while_the_rest_of_the_plan_is_the_same(about, vocabulary):
    chosen = dataclasses.replace(Tiny.PLAN, num_microbatches=4, remat="none")
    there = dataclasses.replace(about, plan=chosen.to_values())
    again, other = Tiny(), Tiny()
    other.PLAN = dataclasses.replace(other.PLAN, schedule="gpipe")
    for settings, free, plan in ((again, (), chosen), (other, Tiny.CHOSEN, other.PLAN)):
        now = About.of("Tiny", settings, "CPU", about.data, vocabulary)
        assert there.keep_choice(now, settings) == free
        assert settings.PLAN == plan


def test_other_text_is_refused(about):
    about.check_data({"train": "a", "heldout": "b"}, "runs")
    with pytest.raises(CheckpointError, match=r"other text \(train a -> c\).*--other_text"):
        about.check_data({"train": "c", "heldout": "b"}, "runs")


def test_digests_tell_what_is_trained_on_from_what_is_judged_by():
    one, two, three = (Sentences((text,)) for text in ("one", "two", "three"))
    first = digests(Corpus("a", one, two))
    assert first == digests(Corpus("b", one, two))
    second = digests(Corpus("a", one, three))
    assert first["train"] == second["train"] and first["heldout"] != second["heldout"]


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
    request = small_request(tmp_path, folder, steps=4, plan=plan, eval_every=2)
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


def test_the_units():
    score = Score(nats=24 * math.log(2), tokens=6, words=4, bytes=12)
    assert score.bits_per_byte == pytest.approx(2.0)
    assert score.token_perplexity == pytest.approx(2.0**4)
    assert score.word_perplexity == pytest.approx(2.0**6)


def test_parts_add_up():
    total = Score(1.5, 2, 3, 4) + Score(2.5, 20, 30, 40)
    assert total == Score(4.0, 22, 33, 44)
    assert total + Score() == total


def test_the_ends_of_the_scale():
    assert math.isnan(metrics.bits_per_byte(0.0, 0))
    assert math.isnan(metrics.ratio(1.0, 0.0))
    assert math.isnan(metrics.perplexity(1.0, 0))
    assert metrics.perplexity(1e6, 1) == math.inf
    # At the beginning perplexities are large; they were written as 4.4e+05.
    assert str(Score(nats=130.0, tokens=20, words=10, bytes=99)).endswith("442,413 a word")
    assert math.isnan(metrics.perplexity(math.nan, 1))


def test_padding_counts_nothing_whatever_it_holds(vocabulary):
    ids = [*vocabulary.encode("two words"), vocabulary.eos_id]
    labels = np.array([[*ids, 0, 0]])
    weights = np.array([[1.0] * len(ids) + [0.0, 0.0]], np.float32)
    nats = np.where(weights > 0, 0.5, np.nan).astype(np.float32)
    score = metrics.score(nats, labels, weights, vocabulary)
    assert score == Score(nats=0.5 * len(ids), tokens=len(ids), words=3, bytes=10)
