"""Trackers of experiments: the packages themselves where they are installed, else their calls."""

import json
import sys
import types

import numpy as np
import pytest

from pipemesh.errors import MissingPackageError, ReportError
from pipemesh.training.run import trackers
from pipemesh.training.run.trackers import FILE, Trackers, parse
from tests.training.run.test_output import trained

BEGIN = {
    "step": 0,
    "name": "Tiny",
    "mesh": "layers:2",
    "flags": {"steps": 3},
    "plan": {"schedule": "1f1b"},
    "versions": {"python": "3"},
}


def fake_wandb(runs):
    """The calls of wandb that are used; `runs` gets what they say, by id."""

    class Run:
        def __init__(self, name, id):
            self.id = id or f"run{len(runs)}"
            self.said = runs.setdefault(self.id, {"name": name, "logged": [], "config": {}})
            self.said["exit"] = None
            self.config = types.SimpleNamespace(update=lambda *a, **k: self._update(*a, **k))
            self.summary = self.said.setdefault("summary", {})

        def _update(self, values, allow_val_change):
            assert allow_val_change
            self.said["config"] |= values

        def define_metric(self, name, step_metric):
            assert (name, step_metric) == ("*", "step")

        def log(self, values):
            self.said["logged"].append(values)

        def finish(self, exit_code):
            self.said["exit"] = exit_code

    def init(project, name, dir, id, resume):
        assert project == "pipemesh" and resume == ("allow" if id else None)
        return Run(name, id)

    module = types.ModuleType("wandb")
    module.init, module.Histogram, module.Run = init, np.histogram, Run
    return module


@pytest.fixture
def wandb(monkeypatch):
    runs = {}
    monkeypatch.setitem(sys.modules, "wandb", fake_wandb(runs))
    return runs


def test_a_tracker_gets_what_the_record_has(eagerly, tmp_path, wandb):
    logdir = tmp_path / "run"
    assert trained(logdir, 4, trackers=("wandb",), histogram_every=4) == 0
    ((name, said),) = wandb.items()
    assert said["name"] == "PlainPoints run" and said["config"]["flags/seed"] == 3
    assert said["config"]["model"] == "PlainPoints" and "plan/mesh" in said["config"]
    assert (said["summary"]["end"], said["exit"]) == ("done", 0)
    record = [json.loads(line) for line in (logdir / "record.jsonl").read_text().splitlines()]
    losses = {event["step"]: event["loss"] for event in record if event["event"] == "step"}
    logged = {each["step"]: each["train/loss"] for each in said["logged"] if "train/loss" in each}
    assert logged == losses and list(logged) == [1, 2, 3, 4]
    assert [each["step"] for each in said["logged"] if "heldout/loss" in each] == [2, 4]
    assert any(key.startswith("updates/") for key in said["logged"][-2])
    # No other tracker was chosen.
    assert not (logdir / "train").exists()
    # It continues the same run.
    assert trained(logdir, 6, restore=logdir / "ckpt-4", trackers=("wandb",)) == 0
    assert list(wandb) == [name]
    assert said["logged"][-1]["step"] == 6
    assert json.loads((logdir / FILE).read_text()) == {"wandb": name}


def test_a_tracker_that_fails_stops_nothing_and_is_tried_again(eagerly, tmp_path, wandb, capsys):
    module = sys.modules["wandb"]
    init = module.init

    def fails(**_):
        raise RuntimeError("no\nnetwork")

    module.init = fails
    assert trained(tmp_path, 4, trackers=("wandb", "tensorboard")) == 0
    err = capsys.readouterr().err
    assert (
        err.count("--tracker=wandb: step 0 cannot be tracked (no network); training goes on") == 1
    )
    assert err.count("wandb") == 1 and not wandb
    assert (tmp_path / "train").exists()
    lines = []
    found = Trackers(("wandb",), str(tmp_path), lines.append)
    found("begin", BEGIN)
    module.init = init
    for step in (1, 99, 100, 101):
        found("step", {"step": step, "loss": 1.0})
    assert len(lines) == 1
    ((_, said),) = wandb.items()
    assert [each["step"] for each in said["logged"]] == [100, 101]


def test_a_file_of_ids_that_is_broken_is_a_failure(tmp_path, wandb):
    (tmp_path / FILE).write_text("{")
    lines = []
    Trackers(("wandb",), str(tmp_path), lines.append)("begin", BEGIN)
    assert "--tracker=wandb: step 0 cannot be tracked (Expecting" in lines[0]


def test_a_run_whose_configuration_fails_is_continued(tmp_path, wandb):
    """Else each try would leave a run without values."""
    module = sys.modules["wandb"]
    update = module.Run._update

    def fails(*_, **__):
        raise RuntimeError("config")

    module.Run._update = fails
    lines = []
    found = Trackers(("wandb",), str(tmp_path), lines.append)
    found("begin", BEGIN)
    assert len(lines) == 1 and list(wandb) == ["run0"]
    module.Run._update = update
    found("step", {"step": 100, "loss": 1.0})
    ((name, said),) = wandb.items()
    assert [each["step"] for each in said["logged"]] == [100] and said["config"]["mesh"]
    assert json.loads((tmp_path / FILE).read_text()) == {"wandb": name}


def test_an_error_ends_the_run_as_failed(tmp_path, wandb):
    found = Trackers(("wandb",), str(tmp_path), print)
    found("begin", BEGIN)
    found("step", {"step": 1, "loss": float("nan"), "why": "text", "is_slow": True, "time": 3.0})
    found("end", {"step": 1, "reason": "TrainingError", "is_done": False})
    ((_, said),) = wandb.items()
    assert [list(each) for each in said["logged"]] == [["step", "train/loss"]]
    assert (said["exit"], said["summary"]["end"]) == (1, "TrainingError")


def test_names_are_checked_before_the_first_step(monkeypatch):
    assert parse("tensorboard, tensorboard") == ("tensorboard",)
    assert parse("none") == ()
    with pytest.raises(ReportError, match="no tracker 'mlflo'; did you mean 'mlflow'"):
        parse("mlflo")
    with pytest.raises(ReportError, match="give one or several of tensorboard, wandb, mlflow, or"):
        parse("")
    monkeypatch.setattr(trackers.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "mlflow", raising=False)
    with pytest.raises(MissingPackageError, match=r"the tracker mlflow needs mlflow.*\[trackers\]"):
        parse("tensorboard,mlflow")


def two_runs(name, tmp_path):
    """A run that is resumed from before its last step, by two processes."""
    for first, last, reason in ((0, 3, "stopped by SIGTERM"), (2, 4, "done")):
        lines = []
        found = Trackers((name,), str(tmp_path), lines.append)
        found("begin", BEGIN | {"step": first, "flags": {"steps": last}})
        for step in range(first + 1, last + 1):
            found("step", {"step": step, "loss": 10.0 * last + step}, {"weights/w": np.ones(3)})
        found("final", {"step": last, "loss": 0.5, "judged": 0.5})
        found("end", {"step": last, "reason": reason, "is_done": reason == "done"})
        assert not lines
    return json.loads((tmp_path / FILE).read_text())[name]


@pytest.mark.filterwarnings("ignore")
def test_mlflow_itself_has_the_run(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow", reason="the extra `trackers` is not installed")
    pytest.importorskip("sqlalchemy", reason="the store of files needs it")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/store.db")
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/store.db")
    client = mlflow.MlflowClient()
    run = client.get_run(two_runs("mlflow", tmp_path))
    assert (run.info.status, run.data.tags["end"]) == ("FINISHED", "done")
    assert run.info.run_name == f"Tiny {tmp_path.name}"
    assert run.data.params["flags/steps"] == "3" and run.data.tags["flags/steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert [(each.step, each.value) for each in history] == [
        (1, 31.0),
        (2, 32.0),
        (3, 33.0),
        (3, 43.0),
        (4, 44.0),
    ]
    assert run.data.metrics["heldout/loss"] == 0.5


@pytest.mark.filterwarnings("ignore")
def test_wandb_itself_has_the_run_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="the extra `trackers` is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = two_runs("wandb", tmp_path)
    files = list((tmp_path / "wandb").glob(f"offline-run-*-{run}/run-{run}.wandb"))
    assert files and all(path.stat().st_size for path in files)
