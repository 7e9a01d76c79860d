"""Trackers of experiments, fed from the events of a run's record: TensorBoard, wandb, MLflow."""

from __future__ import annotations

import abc
import importlib
import importlib.util
import json
import os
import sys
import time
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from pipemesh.checkpoint.files import write_whole
from pipemesh.errors import MissingPackageError, ReportError
from pipemesh.report.record import curve_values
from pipemesh.text import nearest_text

# Ids of the run in trackers, in the log directory, by which a resumed run continues them.
FILE = "trackers.json"
NONE = "none"
# Steps to wait after a failure.
_STEPS_BETWEEN_TRIES = 100
# The curve of each event with values.
_CURVES = {"step": "train", "skipped": "train", "heldout": "heldout", "final": "heldout"}
# What `begin` has that belongs to the configuration of a run.
_CONFIG = ("flags", "plan", "versions")
_NO_HISTOGRAMS: Mapping[str, np.ndarray] = types.MappingProxyType({})


class Tracker(abc.ABC):
    """A tracker of experiments. Any exception counts as a failure, which never ends a run.

    Args:
        folder: the log directory.
    """

    # The package that it needs besides those of pipemesh.
    package: str | None = None
    takes_histograms = True

    def __init__(self, folder: str) -> None:
        self.folder = folder

    @abc.abstractmethod
    def begin(self, name: str, run: str | None) -> str | None:
        """Begins a run, or continues that with the id `run`; returns the id."""

    @abc.abstractmethod
    def configure(self, config: Mapping[str, Any]) -> None:
        """Takes the configuration of a run that has begun, or is continued."""

    @abc.abstractmethod
    def log(
        self,
        curve: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        """Takes values of a step, of the curve `train` or `heldout`."""

    @abc.abstractmethod
    def end(self, reason: str, is_done: bool) -> None:
        """Ends the run of this process."""


class _TensorBoard(Tracker):
    """Event files in the log directory, each curve in its subfolder."""

    def begin(self, name: str, run: str | None) -> None:
        # Writers are made with the first value: each leaves a file. One that failed is not used
        # again, as its file is written in part.
        self._writers: dict[str, Any] = {}

    def configure(self, config: Mapping[str, Any]) -> None:
        pass

    def log(
        self,
        curve: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        import tensorflow as tf

        if curve not in self._writers:
            path = os.path.join(self.folder, curve)
            self._writers[curve] = tf.summary.create_file_writer(path)
        with self._writers[curve].as_default(step=step):
            for key, value in values.items():
                # Perplexities can exceed float32, and TensorFlow rejects such numbers.
                with np.errstate(over="ignore"):
                    tf.summary.scalar(key, np.float32(value))
            for key, value in histograms.items():
                tf.summary.histogram(key, value)
        self._writers[curve].flush()

    def end(self, reason: str, is_done: bool) -> None:
        pass


class _Wandb(Tracker):
    """Weights & Biases, set by its variables: WANDB_MODE, WANDB_PROJECT, WANDB_API_KEY."""

    package = "wandb"

    def begin(self, name: str, run: str | None) -> str:
        wandb: Any = importlib.import_module("wandb")

        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", "pipemesh"),
            name=name,
            dir=self.folder,
            id=run,
            resume="allow" if run else None,
        )
        return self._run.id

    def configure(self, config: Mapping[str, Any]) -> None:
        self._run.config.update(dict(config), allow_val_change=True)
        # A resumed run repeats steps, which wandb's own counter refuses.
        self._run.define_metric("*", step_metric="step")

    def log(
        self,
        curve: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        wandb: Any = importlib.import_module("wandb")

        found: dict[str, Any] = {f"{curve}/{key}": value for key, value in values.items()}
        found |= {key: wandb.Histogram(value) for key, value in histograms.items()}
        self._run.log({"step": step, **found})

    def end(self, reason: str, is_done: bool) -> None:
        self._run.summary["end"] = reason
        self._run.finish(exit_code=0 if is_done else 1)


class _Mlflow(Tracker):
    """MLflow, set by its variables: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME."""

    package = "mlflow"
    takes_histograms = False

    def begin(self, name: str, run: str | None) -> str:
        # A server that does not answer would hold the training up for minutes.
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
        mlflow: Any = importlib.import_module("mlflow")

        self._client = mlflow.MlflowClient()
        # Params cannot change; tags can.
        self._set = self._client.set_tag if run else self._client.log_param
        if run:
            self._client.update_run(run, status="RUNNING")
            self._id = run
            return run
        where = os.environ.get("MLFLOW_EXPERIMENT_NAME", "pipemesh")
        found = self._client.get_experiment_by_name(where)
        experiment = found.experiment_id if found else self._client.create_experiment(where)
        self._id = self._client.create_run(experiment, run_name=name).info.run_id
        return self._id

    def configure(self, config: Mapping[str, Any]) -> None:
        for key, value in config.items():
            self._set(self._id, key, str(value))

    def log(
        self,
        curve: str,
        step: int,
        values: Mapping[str, float],
        histograms: Mapping[str, np.ndarray],
    ) -> None:
        entities: Any = importlib.import_module("mlflow.entities")

        now = int(1000 * time.time())
        metrics = [
            entities.Metric(f"{curve}/{key}", value, now, step) for key, value in values.items()
        ]
        self._client.log_batch(self._id, metrics=metrics)

    def end(self, reason: str, is_done: bool) -> None:
        self._client.set_tag(self._id, "end", reason)
        self._client.set_terminated(self._id, "FINISHED" if is_done else "FAILED")


TRACKERS: Mapping[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "wandb": _Wandb,
    "mlflow": _Mlflow,
}


def parse(text: str) -> tuple[str, ...]:
    """Returns the trackers of a text such as `tensorboard,mlflow`; raises ReportError for an
    unknown one, and MissingPackageError if its package is not installed.
    """
    if text == NONE:
        return ()
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    for name in names:
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise ReportError(
                f"no tracker {name!r}{nearest_text(name, TRACKERS)}; give one or several of "
                f"{known}, or {NONE}"
            )
        package = TRACKERS[name].package
        if package and package not in sys.modules and importlib.util.find_spec(package) is None:
            raise MissingPackageError(f"the tracker {name}", package, "trackers")
    return names


class Trackers:
    """The trackers of a run.

    Args:
        names: their names.
        folder: the log directory.
        warn: called with a line when a tracker fails for the first time.
    """

    def __init__(self, names: tuple[str, ...], folder: str, warn: Callable[[str], object]) -> None:
        self._trackers = {name: TRACKERS[name](folder) for name in names}
        self._folder, self._warn = folder, warn
        self._about: Mapping[str, Any] = {}
        self._begun: set[str] = set()
        # The step of the next try after a failure.
        self._again: dict[str, int] = {}

    def __call__(
        self,
        kind: str,
        values: Mapping[str, Any],
        histograms: Mapping[str, np.ndarray] = _NO_HISTOGRAMS,
    ) -> None:
        """Hands an event of the record on to all trackers."""
        if kind == "begin":
            self._about = values
        if kind not in ("begin", "end", *_CURVES):
            return
        step = int(values["step"])
        for name, tracker in self._trackers.items():
            if step < self._again.get(name, step) and kind != "end":
                continue
            try:
                if name not in self._begun:
                    self._begin(name, tracker)
                if kind in _CURVES:
                    tracker.log(_CURVES[kind], step, curve_values(values), histograms)
                elif kind == "end":
                    tracker.end(str(values["reason"]), bool(values["is_done"]))
                    self._begun.discard(name)
            except Exception as error:
                # Packages of others raise what they like.
                self._begun.discard(name)
                if name not in self._again:
                    why = " ".join(str(error).split()) or type(error).__name__
                    self._warn(
                        f"--tracker={name}: step {step} cannot be tracked ({why}); training goes on"
                    )
                self._again[name] = step + _STEPS_BETWEEN_TRIES

    def _begin(self, name: str, tracker: Tracker) -> None:
        config: dict[str, Any] = {"model": self._about["name"], "mesh": self._about["mesh"]}
        for group in _CONFIG:
            config |= {f"{group}/{key}": value for key, value in self._about[group].items()}
        path = os.path.join(self._folder, FILE)
        runs: dict[str, str] = {}
        if os.path.exists(path):
            with open(path, encoding="utf-8") as file:
                runs = json.load(file)
        title = f"{self._about['name']} {os.path.basename(os.path.abspath(self._folder))}"
        run = tracker.begin(title, runs.get(name))
        # Before what may fail, so that the next try continues the run.
        if run is not None and run != runs.get(name):
            write_whole(path, json.dumps({**runs, name: run}).encode())
        tracker.configure(config)
        self._begun.add(name)
