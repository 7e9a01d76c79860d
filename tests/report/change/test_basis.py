"""What a record gives to simulate changes with: figures, or flops of layers, or stages alone."""

import pytest

from pipemesh.plan import predict
from pipemesh.report import Record, read
from pipemesh.report.change import Basis, basis_of
from tests.report import records


def run(folder, told=(), **changes):
    """A training whose forecast has what is told, and whose step took 200 ms."""
    record = Record(str(folder))
    records.begin(record, plan=records.PLAN | changes)
    records.forecast(record, told)
    records.steps(record, 1, 3)
    records.schedule(record)
    return read(str(folder))


@pytest.mark.parametrize(
    ("told", "knows"),
    [
        (("rows",), [False, False, False, False]),
        (("rows", "layers"), [False, False, True, True]),
        (("rows", "layers", "predicted"), [True, True, True, True]),
    ],
    ids=["stages", "flops", "figures"],
)
def test_the_step_that_was_timed_is_given_back(tmp_path, told, knows):
    found = run(tmp_path, told)
    basis = basis_of(found)
    assert isinstance(basis, Basis), basis
    assert [
        basis.knows_rows,
        basis.knows_halves,
        basis.knows_layers,
        basis.knows_memory,
    ] == knows
    now = predict(basis.plan, basis.figures, basis.batch)
    assert 1e3 * now.seconds == pytest.approx(records.TIMED, rel=1e-3)
    every = basis.changes()
    assert every[0].prediction.seconds < now.seconds
    assert any("boundaries" in each.values for each in every) == basis.knows_layers
    assert any(each.kind == "mesh" for each in every) == basis.knows_rows


def test_what_a_device_has_is_a_limit_if_it_is_known_what_layers_hold(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    limited = run(tmp_path / "a", ("rows", "layers", "limit"))
    basis = basis_of(limited)
    assert basis.memory == 24e6
    assert all(max(each.prediction.memory) <= 24e6 for each in basis.changes())
    # Of stages alone nothing is known, so nothing is left out.
    assert basis_of(run(tmp_path / "b", ("rows", "limit"))).changes()


def test_layers_that_do_not_say_what_they_hold_are_known_but_for_that(tmp_path):
    layers = [layer | {"activation_bytes": None} for layer in records.LAYERS]
    record = Record(str(tmp_path))
    records.begin(record)
    record.add("forecast", rows=16, cuts=[0, 2, 4], layers=layers)
    records.schedule(record)
    basis = basis_of(read(str(tmp_path)))
    assert basis.knows_layers and not basis.knows_memory


def test_a_table_that_is_no_longer_what_its_name_says_is_the_one_that_ran(tmp_path):
    found = run(tmp_path, ("rows", "layers"), schedule="gpipe")
    basis = basis_of(found)
    assert basis.plan.table.rows == found.measured().schedule.rows


@pytest.mark.parametrize(
    ("told", "changes", "why"),
    [
        ((), {}, "how large a batch is"),
        (("rows",), {"lowering": "simd", "schedule": "gpipe"}, "no actions"),
        (("rows",), {"mesh": "layers:x"}, "layers:x"),
        (("rows",), {"num_microbatches": "5"}, "make them equal"),
    ],
)
def test_why_nothing_can_be_simulated_is_said(tmp_path, told, changes, why):
    assert why in basis_of(run(tmp_path, told, **changes))


def test_without_a_timed_step_there_is_nothing_to_simulate_with(tmp_path):
    assert "--trace_schedule" in basis_of(read(str(records.whole(tmp_path, timed=False))))


def test_actions_that_are_not_forecast_are_said(tmp_path):
    from pipemesh.schedule import one_f_one_b, recompute, simulate

    table = recompute(one_f_one_b(2, 4))
    record = Record(str(tmp_path))
    records.begin(record)
    records.forecast(record, ("rows",))
    real = simulate(table)
    costs = real.costs.per_stage(2).durations()
    times = {"starts": real.starts, "ends": real.ends, "schedule": table.to_text()}
    record.add("schedule", costs=costs, **times)
    assert "recompute in actions of their own" in basis_of(read(str(tmp_path)))
