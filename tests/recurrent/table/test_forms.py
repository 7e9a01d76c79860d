"""The form of a run: as wanted, or as its table and its stages make it best."""

import types

import pytest

from pipemesh.errors import PipelineError
from pipemesh.recurrent.remat import FULL
from pipemesh.recurrent.table.forms import form_of, num_actions
from pipemesh.schedule import execution_order, gpipe, interleaved_one_f_one_b, one_f_one_b
from pipemesh.schedule.repeats import Loop


def chosen(schedule, rolled=None, num_nodes=1_000, has_collectives=False):
    order = execution_order(schedule)
    modes = {(action.stage, action.microbatch): FULL for action in order}
    traced = types.SimpleNamespace(
        num_nodes=lambda: num_nodes,
        cut=types.SimpleNamespace(has_collectives=has_collectives),
        stage=types.SimpleNamespace(name="s"),
    )
    traced = [traced] * schedule.num_stages
    form, items = form_of(order, rolled, modes, traced, schedule.num_devices)
    if form != "rolled":
        assert items == order
    return form, items


def test_small_tables_have_operations_of_their_own_for_every_action():
    assert chosen(one_f_one_b(2, 8), num_nodes=10)[0] == "unrolled"
    assert chosen(one_f_one_b(2, 4))[0] == "unrolled"


def test_larger_ones_have_loops_where_these_leave_few_actions():
    form, items = chosen(gpipe(2, 16))
    assert form == "rolled" and num_actions(items) <= 16
    assert any(isinstance(item, Loop) for item in items)


def test_where_many_are_left_there_is_one_loop_over_ticks():
    assert chosen(one_f_one_b(32, 64))[0] == "ticks"
    # It has no steady state that repeats.
    assert chosen(interleaved_one_f_one_b(4, 16))[0] == "ticks"


def test_loops_are_not_looked_for_in_the_longest_tables(monkeypatch):
    monkeypatch.setattr("pipemesh.recurrent.table.forms.SEARCH_BELOW", 100)
    assert chosen(gpipe(2, 32))[0] == "ticks"
    assert chosen(gpipe(2, 32), rolled=True)[0] == "rolled"


@pytest.mark.parametrize(
    ("rolled", "form"), [(False, "unrolled"), (True, "rolled"), ("ticks", "ticks")]
)
def test_a_form_that_is_wanted_is_had(rolled, form):
    for schedule in (gpipe(2, 4), interleaved_one_f_one_b(4, 16)):
        assert chosen(schedule, rolled)[0] == form


def test_collectives_keep_their_own_operations():
    assert chosen(interleaved_one_f_one_b(4, 16), has_collectives=True)[0] == "unrolled"
    with pytest.raises(PipelineError, match="stage 's' has collectives"):
        chosen(gpipe(2, 4), "ticks", has_collectives=True)
