"""Curves of layers, figures of a machine, and their file."""

import dataclasses
import itertools
import json
import math
import pathlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan, predict
from pipemesh.plan.figures import (
    PLAIN,
    Curve,
    Figures,
    LayerFigures,
    figures_of_costs,
    layers_from_values,
    layers_to_values,
)
from pipemesh.plan.network import Link

rising = st.lists(
    st.tuples(st.floats(0.1, 100), st.floats(0, 1e3)),
    min_size=1,
    max_size=6,
    unique_by=lambda point: point[0],
).map(lambda points: tuple(sorted(points)))


@given(rising)
def test_times_never_fall_with_the_rows(points):
    """Neither between measured rows nor beyond them; what does not fall stays as it is."""
    line = Curve(((1, 1.0),))
    times = {"F": Curve(points), "B": Curve(points)}
    layer = LayerFigures("a", times, 0, line, line, optimizer=1.5)
    [read] = layers_from_values(layers_to_values([layer]), "text")
    assert read == layer
    rows = sorted({0.05, 7.5, 1e3, 1e4, *(x for x, _ in points)})
    taken = [layer.takes("F", each) for each in rows]
    assert all(a <= b * (1 + 1e-9) + 1e-9 for a, b in itertools.pairwise(taken))
    values = [y for _, y in points]
    if values == sorted(values):
        assert layer.seconds["F"] == Curve(points)
    # As much in all.
    assert math.isclose(sum(y for _, y in layer.seconds["F"].points), sum(values), abs_tol=1e-6)


def test_curves_rise_beyond_a_falling_last_segment():
    measured = Curve(((1, 1.0), (8, 4.8), (16, 4.1)))
    layer = LayerFigures("a", {"F": measured, "B": measured}, 0, measured, measured)
    assert layer.takes("F", 16) == pytest.approx(4.45)
    assert layer.takes("F", 64) == pytest.approx(4.45 + 48 * 3.45 / 15)


@given(rising, st.floats(0.01, 1e4))
def test_a_curve_goes_through_its_points_and_stays_between_them(points, rows):
    curve = Curve(points)
    assert all(math.isclose(curve.at(x), y, abs_tol=1e-9) for x, y in points)
    found = curve.at(rows)
    assert found >= 0
    for (x, y), (end, then) in itertools.pairwise(points):
        if x <= rows <= end:
            assert min(y, then) - 1e-9 <= found <= max(y, then) + 1e-9


def test_fewer_rows_than_were_measured_still_take_time():
    """Two points that rise faster than their rows: the line falls below 0 before the first."""
    curve = Curve(((2, 1.0), (4, 10.0)))
    assert curve.at(1) == 0.5
    # With a fixed part it is the line.
    assert Curve(((2, 5.0), (4, 6.0))).at(1) == 4.5


@pytest.mark.parametrize(
    "points",
    [(), ((1, 1), (1, 2)), ((2, 1), (1, 2)), ((0, 1),), ((1, -1),), ((1, math.inf),)],
)
def test_invalid_curves_are_errors(points):
    with pytest.raises(PlanError, match="a curve has the points"):
        Curve(points)


def layer(**seconds):
    line = Curve(((1, 1.0),))
    curves = {kind.replace("_", "+"): Curve(((1, s),)) for kind, s in seconds.items()}
    return LayerFigures("a", curves, 0, line, line)


def test_missing_kinds_follow_from_the_others():
    split = layer(F=1.0, I=2.0, W=3.0)
    assert split.takes("B", 2) == 10.0
    # The first action of the backward pass computes again, the other finds it.
    assert split.takes("I", 1, again=True) == 3.0
    assert split.takes("W", 1, again=True) == 3.0
    assert split.takes("F", 1, again=True) == 1.0
    whole = layer(F=1.0, B=4.0, B_=4.5)
    assert (whole.takes("I", 1), whole.takes("W", 1)) == (2.0, 2.0)
    assert whole.takes("B", 1, again=True) == 4.5


def test_times_have_to_be_there():
    with pytest.raises(PlanError, match="needs that of F"):
        layer(F=1.0, I=1.0)
    with pytest.raises(PlanError, match="times of \\['X'\\]"):
        layer(F=1.0, B=1.0, X=1.0)


def test_a_faster_device_takes_less():
    assert layer(F=1.0, B=4.0).faster(4).takes("B", 2) == 2.0
    with pytest.raises(PlanError, match="times as fast"):
        layer(F=1.0, B=4.0).faster(0)


def test_sums_are_given_of_all_layers_or_none():
    costs = [LayerCost(1.0), LayerCost(2.0)]
    one, two = figures_of_costs(costs, 2, split=8, summed=[0, 100])
    assert one.shares == {} and two.shares[""].most == 8
    assert [each.size.at(4) for each in two.shares[""].sent] == [200, 200]
    with pytest.raises(PlanError, match="of 1 layers, but there are 2"):
        figures_of_costs(costs, 2, summed=[1])


@pytest.mark.parametrize("values", [[1], [{"name": "a"}], 3, [{"name": "a", "seconds": 1}]])
def test_malformed_layers_name_the_file(values):
    with pytest.raises(PlanError, match=r"figures\.json"):
        layers_from_values(values, "figures.json")


def test_work_follows_as_times_do_and_goes_with_the_device():
    """Two products at once: a `B` takes as long as an `F`, and is twice as much work."""
    line, twice = Curve(((1, 1.0),)), Curve(((1, 2.0),))
    layer = LayerFigures("a", {"F": line, "B": line}, 0, line, line, work={"F": line, "B": twice})
    assert (layer.takes("B", 3), layer.computes("B", 3)) == (3, 6)
    assert layer.computes("B", 3, again=True) == 9 and layer.computes("W", 3) == 3
    fast = layer.faster(2.0)
    assert (fast.takes("B", 3), fast.computes("B", 3)) == (1.5, 3)
    [read] = layers_from_values(json.loads(json.dumps(layers_to_values([layer]))), "x")
    assert read == layer
    plain = LayerFigures("a", {"F": line, "B": twice}, 0, line, line)
    assert plain.computes("B", 3, again=True) == plain.takes("B", 3, again=True) == 9


def test_work_of_unknown_kinds_is_an_error():
    line = Curve(((1, 1.0),))
    with pytest.raises(PlanError, match="it needs that of F"):
        LayerFigures("a", {"F": line, "B": line}, 0, line, line, work={"B": line})


LAYERS = tuple(figures_of_costs([LayerCost(1.0, name="a"), LayerCost(2.0, name="b")], rows=2))


def test_figures_go_through_json():
    figures = Figures(LAYERS, 1e-4, 0.01, 1e-10, 1.0, Link(1e-6, 1e10), 2.0, {"B": 1.5})
    assert Figures.from_json(figures.to_json(), "x") == figures
    loop = {"alike": (0, 2), "loop_pace": 1.25, "error": 0.03}
    shared = dataclasses.replace(figures, sums=Link(1e-5, math.inf), crowding=0.5, **loop)
    assert Figures.from_json(shared.to_json(), "x") == shared
    assert Figures.from_json(Figures(LAYERS).to_json(), "x").transfer.bandwidth == math.inf


@pytest.mark.parametrize(
    ("values", "told"),
    [({"alike": (1, 3)}, "alike is .1, 3.; there are 2 layers"), ({"loop_pace": 0.0}, "above 0")],
)
def test_malformed_figures_of_one_program_are_errors(values, told):
    with pytest.raises(PlanError, match=told):
        Figures(LAYERS, **values)


@pytest.mark.parametrize("name", ["dense.json", "language.json"])
def test_saved_figures_are_read(name):
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan" / name
    figures = Figures.read(str(path))
    saved, again = json.loads(path.read_text()), json.loads(figures.to_json())
    # Measured times that fall with the rows are levelled.
    layers = saved.pop("layers"), again.pop("layers")
    assert again | saved == again
    for old, new in zip(*layers, strict=True):
        # Of before layers had shares.
        most, summed, calls = (old.pop(name) for name in ("split", "summed", "sums"))
        whole = {name: old.pop(name) for name in ("whole", "pending_whole")}
        assert new | {**old, "seconds": new["seconds"]} == new
        for shares in new["shares"].values():
            assert shares | whole | {"most": most} == shares
            assert shares["sent"] == [["all_reduce", back, calls, summed] for back in (0, 1)]
        assert bool(new["shares"]) == (most > 1)
    assert Figures.from_json(figures.to_json(), name) == figures


OLD = {
    "layers:1;model:2": (0.082165142, 0.152474003, 30864388),
    "layers:2;data:2;model:2": (0.098813187, 0.191007297, 10974081),
    "layers:2;model:4": (0.149810323, 0.288697709, 5736449),
}


@pytest.mark.parametrize("mesh", OLD)
def test_old_files_have_the_forecasts_of_before(mesh):
    """Seconds, work and bytes that commit 1fc1d6b forecast, before layers had several shares."""
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "plan" / "language.json"
    figures = Figures.read(str(path))
    layout = ";".join(["batch:data"] * ("data" in mesh) + [figures.rules])
    schedule, number, remat = {
        "layers:1;model:2": ("1f1b", 2, "none"),
        "layers:2;data:2;model:2": ("zb_h1", 4, "none"),
        "layers:2;model:4": ("interleaved:2", 4, "full"),
    }[mesh]
    plan = Plan(mesh, layout, schedule, num_microbatches=number, remat=remat)
    found = predict(plan, figures, figures.batch)
    assert (found.seconds, found.work, max(found.memory)) == pytest.approx(OLD[mesh], rel=1e-6)


def test_a_file_of_before_can_be_read():
    """A training that goes on finds one in its log directory."""
    figures = Figures(LAYERS, cores=2.0)
    before = figures.to_json().replace('"crowding": 0.0', '"handover": 0.0001')
    assert "handover" in before and Figures.from_json(before, "before") == figures


def test_pace_scales_every_forecast_by_one_factor():
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


def test_pace_needs_a_plain_step():
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
def test_malformed_figures_are_errors(text, told):
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
