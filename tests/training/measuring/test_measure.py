"""Figures of a model that were measured here: complete, and good for plans."""

import dataclasses
import json
import math
import re
import sys

import pytest
import tensorflow as tf

from pipemesh.commands.main import main
from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures, figures_of_costs
from pipemesh.training.measuring import RegisteredSteps, measure
from pipemesh.training.measuring.measure import (
    _program,
    _with_halves,
    number_of_layers,
    plans_to_fit,
    with_rows,
)
from pipemesh.training.measuring.timed_step import TimedStep
from pipemesh.training.registered import RegisteredModel
from tests.commands.program import run
from tests.training.small_models import DeepPoints, PlannedPoints, StagedPoints


@pytest.mark.slow
def test_measured_figures_serve_to_find_plans(tmp_path, capsys):
    """Layers and steps are timed in one process, and read in another."""
    path, plans = tmp_path / "figures.json", tmp_path / "plans.json"
    model = "--model=tests.training.small_models.PairsOfPoints"
    # The batch is that of the forecast: the model has no such attribute.
    words = ["--devices=2", "--optimizer=muon", "--batch_size=2"]
    code, out, err = run("plan", model, *words, f"--save={path}")
    assert code == 0 and "error" not in err, err
    assert "measuring 1 of about 24: 3 layers, 1 row a microbatch, forward and backward\n" in err
    assert re.search(r"measuring 2 of about 24, about \d+ s left: 3 layers, 2 rows a micro", err)
    figures = Figures.from_json(path.read_text(), str(path))
    assert len(figures.layers) == 3 and figures.batch == 2
    assert figures.settings == {"optimizer": "muon"}
    assert [layer.trained for layer in figures.layers] == [1.0, 1.0, 1.0]
    # A momentum of 24 weights; two moments of the biases, and of a head with one output.
    assert [layer.optimizer for layer in figures.layers] == [(24 + 12) / 30, 2.0, None]
    assert figures.optimizer == pytest.approx((36 + 14 + 2) / 37)
    # Of the layers with weights: 4 x 6 and 6 x 1 floats, and biases.
    assert [layer.parameter_bytes for layer in figures.layers] == [120, 28, 0]
    # The last layer has no weights, and so no `W`.
    for layer in figures.layers[:-1]:
        assert set(layer.seconds) == {"F", "B", "I", "W"}
        assert all(curve.at(2) > 0 for curve in layer.seconds.values())
        assert set(layer.work) == (set(layer.seconds) if sys.platform == "linux" else set())
        assert 0 <= layer.again <= 1
        # Tensors this small are not counted on a CPU.
        assert layer.working is None or layer.working.at(2) >= 0
    assert figures.fixed > 0 and figures.update >= 0 and 0 < figures.crowding < 1
    # Rows of 6 floats and a label go to the next layer.
    assert figures.layers[0].outputs.at(2) == 2 * (6 + 1) * 4
    assert main(["plan", str(path), "--devices=2", f"--json={plans}"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == out.splitlines()[-1]
    assert json.loads(plans.read_text())[0]["seconds"] > 0
    # And steps of the best plans, of the model in a third one, beside plain ones.
    assert figures.plain_step > 0
    code, out, err = run("plan", str(path), model, "--devices=2", "--trials=2", f"--json={plans}")
    tried = [line for line in err.splitlines() if line.startswith("measuring a trial of")]
    # A plain one is run once, whether it is among the best or not.
    kinds = ("'mesh=layers:1 remat=none'", "'mesh=layers:1 boundaries=0,3 remat=none'")
    plain = [line for line in tried if line.endswith(kinds)]
    assert code == 0 and len(plain) == 1, err
    assert len(tried) == (2 if "boundaries" in plain[0] else 3)
    assert "a reference step now takes" in out
    first, second, *others = json.loads(plans.read_text())
    assert 0 < first["trial"] <= second["trial"] and not any("trial" in each for each in others)


LIKE_OTHERS = [
    ({}, [0, 1, 1, 1, 1, 2, 3], (0, 1, 5, 6), (0, 1, 2, 3, 5, 6)),
    (
        {"freeze": "cell_000/|_003/"},
        [0, 1, 2, 3, 2, 4, 5],
        (0, 1, 2, 3, 5, 6),
        (0, 1, 2, 3, 5, 6),
    ),
    # Below the trained layer there is no backward pass.
    ({"freeze": "cell_00[0124]/"}, [0, 1, 1, 2, 3, 4, 5], (0, 1, 3, 4, 5, 6), (0, 1, 3, 4, 5, 6)),
]


@pytest.mark.parametrize(("filters", "kinds", "firsts", "six"), LIKE_OTHERS, ids=str)
def test_layers_that_are_alike_are_measured_once(filters, kinds, firsts, six, eagerly):
    """Only layers that are trained alike; the first and the last ones differ in shape."""

    def make(plan):
        return RegisteredModel(DeepPoints(), "points", plan.to_values(), **filters)

    batch = next(iter(make(Plan()).train_data(0)))
    layers = measure._layers(make, batch)
    assert layers.kinds == kinds
    assert tuple(layers.firsts) == layers.at_least(2) == firsts and layers.at_least(6) == six
    assert layers.cuts(len(firsts)) == (*firsts, 7) and layers.cuts(1) == (0, 7)
    plan = Plan("layers:2", boundaries=(0, 5, 7))
    step = TimedStep(make(plan), batch, layers=layers.firsts)
    first, second = step.stack.params.cell_tpl
    numbers = [int(sub.name[-3:]) for sub in (*first.sub, *second.sub)]
    assert numbers == list(firsts) and len(second.sub) == 2


def test_layers_are_those_of_the_pipeline():
    def make(kind):
        return lambda plan: RegisteredModel(kind(), "points", plan.to_values())

    assert number_of_layers(make(PlannedPoints)) == 3
    with pytest.raises(PlanError, match="cuts its layers itself"):
        number_of_layers(lambda plan: RegisteredModel(StagedPoints(), "points"))


def test_a_model_without_a_plan_is_refused(monkeypatch, eagerly):
    for name in ("prepare_graphs_quickly", "start_cpu_devices"):
        monkeypatch.setattr(f"pipemesh.backend.devices.{name}", lambda *_: None)
    with pytest.raises(PlanError, match="StagedPoints' has no attribute PLAN"):
        RegisteredSteps("tests.training.small_models.StagedPoints", 2)


def test_halves_of_a_backward_pass_are_scaled():
    """On two cores more than the whole, which does both at once; without weights one is nothing."""
    seconds = {"F": {1: 1.0, 4: 4.0}, "B": {1: 2.0, 4: 5.0}, "I": {4: 4.0}, "W": {4: 3.5}}
    curves = _with_halves(seconds, 4)
    assert [curves[kind].at(4) for kind in "FBIW"] == [4.0, 5.0, 4.0, 3.5]
    assert [curves[kind].at(1) for kind in "FBIW"] == pytest.approx([1.0, 2.0, 1.6, 1.4])
    del seconds["W"]
    assert _with_halves(seconds, 4)["W"].at(4) == 0
    bare = {"F": {4: 1.0}, "B": {4: 0.0}}
    assert [_with_halves(bare, 4)[kind].at(4) for kind in "FBIW"] == [1, 0, 0, 0]


def test_rows_are_cut_and_repeated():
    batch = {"x": tf.reshape(tf.range(6), [3, 2])}
    assert with_rows(batch, 2)["x"].numpy().tolist() == [[0, 1], [2, 3]]
    assert with_rows(batch, 4)["x"].numpy().tolist() == [[0, 1], [2, 3], [4, 5], [0, 1]]


def test_plans_to_fit_use_the_devices_and_rules():
    costs = [LayerCost(1.0)] * 3
    plain = Figures(tuple(figures_of_costs(costs, 1)), batch=12)
    shared = Figures(
        tuple(figures_of_costs(costs, 1, split=4, summed=[1] * 3)), rules="heads:model", batch=12
    )

    def meshes(figures, devices):
        return {str(plan.mesh) for plan in plans_to_fit(figures, devices)}

    assert meshes(plain, 1) == {"layers:1"}
    assert "layers:1;model:4" in meshes(shared, 4) - meshes(shared, 6)
    assert "layers:1;data:2" in meshes(plain, 2)
    assert "layers:1;model:2" in meshes(shared, 2) - meshes(plain, 2)
    for plan in plans_to_fit(shared, 2):
        plan.check_batch(12)
    assert Plan(num_microbatches=6, remat="none") in list(plans_to_fit(plain, 2))


def test_the_program_that_is_measured_is_cut_as_models_are_that_cut_themselves():
    """It had no boundaries, so such a model cut itself otherwise than one program can be."""
    figures = Figures(tuple(figures_of_costs([LayerCost(1.0)] * 5, 1)), batch=12, alike=(1, 3))
    assert _program(figures, 2).boundaries == (0, 2, 5)
    assert _program(dataclasses.replace(figures, alike=(0, 0)), 2) is None


class Said:
    """Takes as many seconds as its plan has microbatches; of some plans it has none."""

    def __init__(self, plan, batch):
        if plan.num_microbatches == 3:
            raise PlanError(f"{batch} rows are not three microbatches")
        if plan.num_microbatches == 1:
            raise tf.errors.ResourceExhaustedError(None, None, "OOM")
        self._plan, self.cpu = plan, 0.0

    def run(self):
        return float(self._plan.num_microbatches)


def test_an_impossible_plan_takes_infinite_time(monkeypatch):
    monkeypatch.setattr(measure, "TimedStep", Said)
    # What earlier tests left takes seconds.
    monkeypatch.setattr(measure.gc, "collect", lambda: None)
    plans, told = [Plan(num_microbatches=n) for n in (4, 3, 2, 1)], []
    seconds = measure.seconds_of(lambda plan: plan, 8, plans, told.append)
    assert seconds == [4.0, math.inf, 2.0, math.inf]
    assert told[1].startswith("a trial of 'mesh=layers:1 num_microbatches=3'")
    assert told[2].endswith("cannot be had: 8 rows are not three microbatches")
    assert told[-1].endswith("needs more memory than there is")
    with pytest.raises(PlanError, match="8 rows are not"):
        measure.seconds_of(lambda plan: plan, 8, plans[1:2])
