"""What is known of a step before it is measured stands in the record, and nothing that is not."""

import json
import os

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Figures, Plan, predict
from pipemesh.plan.figures import figures_of_costs
from pipemesh.report import Basis, basis_of, read
from pipemesh.training import Loop, Options, Trainer
from pipemesh.training.registered import RegisteredModel
from tests.commands.program import refused, run
from tests.training import small_models

PLANNED = "--model=tests.training.small_models.PlannedPoints"


def figures(layers=5):
    costs = [
        LayerCost(
            1e-3, backward=2e-3, parameter_bytes=100.0, activation_bytes=10.0, boundary_bytes=1.0
        )
    ] * layers
    return Figures(tuple(figures_of_costs(costs, 4)), action=1e-4, batch=8, about="five layers")


def forecast(logdir, capsys, name="StagedPoints", mesh="layers:1", **changes):
    """The forecast of a training in this process, and what it says."""
    options = Options(logdir=str(logdir), steps=2, eval_batches=1, **changes)
    values = {} if name == "PlainPoints" else {"mesh": mesh}
    subject = RegisteredModel(getattr(small_models, name)(), name, values)
    assert Loop(Trainer(subject, options), options).run() == 0
    return read(str(logdir)).last.get("forecast"), capsys.readouterr().out


@pytest.mark.slow
def test_what_was_not_measured_is_said_to_be_unknown(eagerly, tmp_path, capsys):
    found, out = forecast(tmp_path, capsys, "PlannedPoints")
    assert "predicted" not in found and "was not measured" in found["unpredicted"]
    assert (found["rows"], found["device_memory"]) == (8, None)
    assert found["cuts"][0] == 0 and found["cores"] == os.cpu_count()
    # Nobody asked.
    assert "predicted:" not in out


@pytest.mark.slow
def test_what_was_measured_says_what_a_step_takes(eagerly, tmp_path, capsys):
    count = len(small_models.stack_of(1)[0].sub)
    (tmp_path / "figures.json").write_text(figures(count).to_json())
    found, out = forecast(tmp_path, capsys, "PlannedPoints", device_memory=1e9)
    plan = Plan("layers:1", num_microbatches=2, boundaries=tuple(found["cuts"]))
    ahead = predict(plan, figures(count), 8)
    assert found["predicted"]["seconds"] == pytest.approx(ahead.seconds)
    assert found["predicted"]["parts"] == pytest.approx(ahead.parts)
    assert found["predicted"]["memory"] == list(ahead.memory)
    assert found["predicted"]["about"] == "five layers" and found["device_memory"] == 1e9
    there = Figures.from_json(json.dumps(found["figures"]), "the record")
    assert there == figures(count)
    assert f"predicted: {1e3 * ahead.seconds:.4g} ms a step by what was measured" in out


@pytest.mark.slow
def test_figures_of_another_model_are_said_to_be_none(eagerly, tmp_path, capsys):
    path = tmp_path / "of_another.json"
    path.write_text(figures(50).to_json())
    found, out = forecast(tmp_path, capsys, "PlannedPoints", figures=str(path))
    assert "there are 50 layers" in found["unpredicted"] and "predicted" not in found
    assert "predicted: seconds are not predicted: boundaries end at" in out


def test_without_a_pipeline_nothing_is_expected(eagerly, tmp_path, capsys):
    found, _ = forecast(tmp_path, capsys, "PlainPoints")
    assert found is None


@pytest.mark.slow
def test_a_step_that_is_timed_says_what_would_help(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(figures(len(small_models.stack_of(1)[0].sub)).to_json())
    words = [PLANNED, f"--figures={path}", f"--logdir={tmp_path / 'run'}", "--steps=3"]
    code, _, err = run("train", *words, "--trace_schedule")
    assert code == 0, err
    found = read(str(tmp_path / "run"))
    assert found.fact("schedule", "seconds") > 1e-3 * found.measured().makespan
    # That of the first step, which builds the graph, is none.
    assert [step for step, _ in found.train["seconds"]] == [2, 3]
    basis = basis_of(found)
    assert isinstance(basis, Basis) and basis.knows_rows
    text = (tmp_path / "run" / "report.html").read_text()
    assert "Predicted from measurements of the layers (five layers)." in text
    assert "changes were simulated with the durations of the timed step" in text
    told = refused("train", PLANNED, f"--figures={tmp_path}", f"--logdir={tmp_path / 'other'}")
    assert "cannot be read" in told
