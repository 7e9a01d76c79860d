"""Figures of a model on a machine, as a file."""

import dataclasses
import math

import pytest

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan, predict
from pipemesh.plan.figures import PLAIN, Figures
from pipemesh.plan.layer_figures import figures_of_costs
from pipemesh.plan.network import Link

LAYERS = tuple(figures_of_costs([LayerCost(1.0, name="a"), LayerCost(2.0, name="b")], rows=2))


def test_figures_go_through_json():
    figures = Figures(LAYERS, 1e-4, 0.01, 1e-10, 1.0, Link(1e-6, 1e10), 2.0, {"B": 1.5})
    assert Figures.from_json(figures.to_json(), "x") == figures
    shared = dataclasses.replace(figures, sums=Link(1e-5, math.inf), crowding=0.5)
    assert Figures.from_json(shared.to_json(), "x") == shared
    assert Figures.from_json(Figures(LAYERS).to_json(), "x").transfer.bandwidth == math.inf


def test_a_file_of_before_can_be_read():
    """A training that goes on finds one in its log directory."""
    figures = Figures(LAYERS, cores=2.0)
    before = figures.to_json().replace('"crowding": 0.0', '"handover": 0.0001')
    assert "handover" in before and Figures.from_json(before, "before") == figures


def test_of_a_slower_machine_every_forecast_is_longer_by_one_factor():
    figures = Figures(
        LAYERS, 1e-3, 0.1, 1e-3, 1.0, Link(0.01, 1e3), 2.0, sums=Link(0.1, 1e4), plain_step=20.0
    )
    assert Figures.from_json(figures.to_json(), "x") == figures
    slower = figures.at_pace(25.0)
    assert slower.plain_step == 25.0
    for plan in (PLAIN, Plan("layers:2", num_microbatches=4), Plan("layers:1;b:2", "batch:b")):
        before, after = predict(plan, figures, 8), predict(plan, slower, 8)
        assert after.seconds == pytest.approx(1.25 * before.seconds)
        assert after.work == pytest.approx(1.25 * before.work)
        assert after.memory == before.memory and after.bubble == pytest.approx(before.bubble)


def test_the_pace_is_of_what_is_known():
    with pytest.raises(PlanError, match=r"took 0\.0 s when figures were measured and 2\.0 s now"):
        Figures(LAYERS).at_pace(2.0)
    with pytest.raises(PlanError, match="must be above 0"):
        Figures(LAYERS, plain_step=1.0).at_pace(0.0)


def test_a_list_of_costs_is_figures_too():
    found = Figures.from_json('[{"forward": 3.0, "name": "a"}]', "x", rows=2)
    assert found.layers[0].takes("B", 1) == 3.0


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "x is no JSON"),
        ("3", "must be a JSON object"),
        ("{}", "figures are of no layer"),
        ('[{"forwards": 1}]', "no list of costs"),
        ("[3]", "no list of costs"),
        ('{"layerz": []}', "'layerz' is nothing"),
        ('{"layers": 3}', "no figures of layers"),
    ],
)
def test_what_is_malformed_is_an_error(text, told):
    with pytest.raises(PlanError, match=told):
        Figures.from_json(text, "x")


@pytest.mark.parametrize(
    "change",
    [
        {"action": -1.0},
        {"fixed": math.nan},
        {"cores": 0.0},
        {"crowding": 1.5},
        {"plain_step": -1.0},
        {"update_memory": 0.5},
    ],
)
def test_numbers_have_to_be_some(change):
    with pytest.raises(PlanError):
        Figures(LAYERS, **change)
