"""`--mesh_shape=auto`: what is chosen, and that it is checked and kept like any other plan."""

import json
import re

import pytest

from pipemesh.partition import LayerCost
from pipemesh.plan import Plan, predict
from pipemesh.plan.figures import Figures, figures_of_costs
from pipemesh.plan.search import SearchSpace, search
from tests.commands.program import done, refused, without_tensorflow

MODEL = "--model=tests.training.small_models.PlannedPoints"


@pytest.fixture
def figures(tmp_path):
    """Of five layers of which each takes so long that two places are best."""
    costs = [
        LayerCost(
            1.0, backward=2.0, parameter_bytes=100.0, activation_bytes=10.0, boundary_bytes=1.0
        )
    ] * 5
    found = Figures(tuple(figures_of_costs(costs, 8)), action=1e-3, batch=8)
    path = tmp_path / "figures.json"
    path.write_text(found.to_json())
    return found, path


@pytest.mark.slow
def test_the_best_plan_is_taken_said_kept_and_gone_on_with(tmp_path, figures):
    found, path = figures
    logdir = tmp_path / "run"
    flags = ["--mesh_shape=auto:2", f"--figures={path}", "--layout=", "--schedule=1f1b"]
    fixed = {"schedule": "1f1b", "layout": ""}
    best = search(found, SearchSpace(2, 8, fixed=fixed), count=1)[0].plan
    out = done("train", MODEL, *flags, "--steps=2", f"--logdir={logdir}")
    (line,) = [line for line in out.splitlines() if line.startswith("chosen for 2 devices: ")]
    assert f"--mesh_shape={best.mesh} " in line
    assert f"--num_microbatches={best.num_microbatches} " in line and "what binds" in line
    assert f"PlannedPoints: {best.mesh}" in out
    # Who goes on does not search again.
    out = done("train", f"--logdir={logdir}", "--steps=3")
    assert f"--mesh_shape={best.mesh}" in out and "chosen" not in out and "changed" not in out


@pytest.mark.slow
def test_of_the_best_plans_steps_are_run_if_that_is_asked_for(tmp_path, figures):
    _, path = figures
    flags = ["--mesh_shape=auto:2", f"--figures={path}", "--schedule=gpipe", "--plan_trials=2"]
    # Small graphs.
    flags += ["--num_microbatches=1", "--remat=none"]
    flags += ["--device_memory=1GB", "--steps=1", f"--logdir={tmp_path / 'run'}"]
    out = done("train", MODEL, *flags)
    (line,) = [line for line in out.splitlines() if line.startswith("chosen for 2 devices: ")]
    trial = re.search(r"\(([\d.]+) ms a step in a trial, by forecast ([\d.e+]+) ms", line)
    # Forecasts are of layers that take seconds.
    assert trial and float(trial[1]) < 1e3 < float(trial[2]), line
    assert "held out at step 1" in out


def test_what_cannot_be_chosen_is_one_line_without_tensorflow(tmp_path, figures):
    refusals = [
        (["--mesh_shape=auto:x"], "must be auto, or auto:N for N devices"),
        (["--mesh_shape=auto:2", "--plain"], "--plain computes on one device"),
        (["--mesh_shape=auto:2", "--lowering=simd"], "forecasts are of --lowering=placement"),
        (["--mesh_shape=auto:2", "--plan_trials=-1"], "plan_trials"),
        (["--mesh_shape=auto:2", "--device_memory=7GiBB"], "--device_memory: '7GiBB' has the unit"),
        (["--mesh_shape=auto:2", "--device_memory=10"], "no plan fits into 10 bytes a device"),
        (["--mesh_shape=auto:2", "--schedule=1f1c"], "schedule"),
    ]
    begin = ["train", MODEL, f"--figures={figures[1]}", f"--logdir={tmp_path / 'run'}"]
    answers = without_tensorflow(*([*begin, *words] for words, _ in refusals))
    for (words, told), (code, _, err) in zip(refusals, answers, strict=True):
        assert (code, err.count("\n")) == (2, 1) and told in err, (words, err)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--figures=x"], "x cannot be read: No such file"),
        (["--device_memory=10", "FIGURES"], "no plan fits into 10 bytes"),
    ],
)
def test_figures_and_memory_of_a_mesh_are_checked(tmp_path, figures, words, told):
    words = [f"--figures={figures[1]}" if word == "FIGURES" else word for word in words]
    logdir = f"--logdir={tmp_path / 'run'}"
    assert told in refused("train", MODEL, "--mesh_shape=layers:2", *words, logdir)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does(tmp_path, figures):
    found, path = figures
    plan = Plan("layers:2", schedule="gpipe", num_microbatches=8, remat="none")
    held = max(predict(plan, found, 8).memory)
    words = ["train", MODEL, f"--figures={path}", f"--logdir={tmp_path / 'run'}", "--steps=1"]
    words += ["--schedule=gpipe", "--num_microbatches=8", "--remat=none"]
    told = refused(*words, f"--device_memory={held * 0.99}")
    assert "needs" in told and "the nearest plan that fits is 'mesh=layers:2 schedule=" in told
    # All but the schedule is as it was asked for.
    assert "num_microbatches=8" in told.partition("nearest")[2]
    assert "remat=none" in told.partition("nearest")[2]
    # Before the first step, so nothing was trained.
    assert not list(tmp_path.glob("run/ckpt*"))
    assert "held out at step 1" in done(*words, f"--device_memory={held * 1.01}")


@pytest.mark.slow
def test_models_that_cut_themselves_cannot_be_measured(tmp_path):
    told = refused(
        "train",
        "--model=tests.training.small_models.StagedPoints",
        "--mesh_shape=auto:2",
        f"--logdir={tmp_path}",
    )
    assert "the model cannot be measured" in told and "has no attribute PLAN" in told
    assert not (tmp_path / "figures.json").exists()


@pytest.mark.slow
def test_figures_of_another_file_are_checked(tmp_path):
    path = tmp_path / "figures.json"
    path.write_text(json.dumps({"layers": 3}))
    words = ["train", MODEL, "--mesh_shape=auto:2", f"--figures={path}", f"--logdir={tmp_path}"]
    assert "has no figures of layers" in refused(*words)
