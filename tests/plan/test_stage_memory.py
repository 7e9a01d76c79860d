"""What devices hold follows their actions, one after the other."""

import dataclasses

from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures
from pipemesh.plan.layer_figures import Curve, LayerFigures
from pipemesh.plan.stage_costs import stages_of
from pipemesh.plan.stage_memory import device_memory
from pipemesh.schedule import Schedule

LINE = Curve(((1, 1.0),))


def memory(plan, *layers, batch=4, place=0, **more):
    figures = Figures(layers, optimizer=2.0, **more)
    return device_memory(stages_of(plan, figures, batch), figures, place)


def layer(weights, kept, **more):
    times = {"F": LINE, "B": LINE}
    return LayerFigures("a", times, weights, Curve(((1, kept),)), Curve(((1, 1.0),)), **more)


def test_gradients_come_as_what_is_kept_goes():
    """One microbatch: a layer's gradient is there before what it kept is gone."""
    plan = Plan(remat="none")
    states = 3 * 10 * 3
    assert memory(plan, *[layer(10, 10.0)] * 3, batch=1) == states + 4 * 10
    # With few gradients the peak is the first forward pass.
    small = [layer(1, 10.0)] * 3
    assert memory(plan, *small, batch=1) == 3 * 3 + 30 + 1
    # Of several microbatches all but the first one find them.
    several = Plan(schedule="gpipe", num_microbatches=4, remat="none")
    assert memory(several, *[layer(10, 10.0)] * 3) == states + 4 * 30 + 10
    one_by_one = Plan(num_microbatches=4, remat="none")
    assert memory(one_by_one, *[layer(10, 10.0)] * 3) == states + 30 + 30


def test_what_is_made_for_sums_that_are_not_there_yet_is_those_sums():
    plan = Plan(remat="none")
    assert memory(plan, layer(10, 5.0, working=Curve(((1, 12.0),))), batch=1) == 30 + 5 + 12
    later = Plan(num_microbatches=4, remat="none")
    assert memory(later, layer(10, 5.0, working=Curve(((1, 12.0),)))) == 30 + 10 + 5 + 12


def test_sums_are_made_by_the_first_half_that_has_weights():
    table = Schedule.from_text("0: 0F0 0F1 0I0 0I1 0W0 0W1")
    plan = Plan(schedule=table, num_microbatches=2, remat="none")
    # Both microbatches are pending when the first W begins.
    found = memory(plan, layer(10, 2.0, pending=Curve(((1, 3.0),))), batch=2)
    assert found == 30 + 2 * 3 + 10


def test_an_update_may_need_more_than_all_actions():
    plan = Plan(num_microbatches=4, remat="none")
    assert memory(plan, layer(10, 1.0)) == 30 + 10 + 1
    assert memory(plan, layer(10, 1.0), update_memory=1.5) == 30 + 15


def test_each_stage_keeps_what_its_own_policy_needs():
    layers = [layer(10, 8.0)] * 2
    for remat, held in (("full,none", (10 + 8, 10 + 8)), ("none,full", (10 + 16, 10 + 8))):
        plan = Plan("layers:2", num_microbatches=4, remat=remat)
        assert tuple(memory(plan, *layers, place=p) - 30 for p in (0, 1)) == held


def test_a_w_that_computes_again_was_left_gradients_alone():
    """Half of what is pending, and what the stage was given, a byte."""
    table = Schedule.from_text("0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1")
    layers = [layer(0, 8.0)] * 2
    full, twice = (
        memory(
            Plan("layers:2", schedule=table, num_microbatches=2, remat=remat),
            *layers,
            batch=2,
            place=1,
        )
        for remat in ("full", "twice")
    )
    assert full == 2 * 8
    # The first one is pending while the second one's stage is computed again.
    assert twice == (1 + 8 / 2) + 8


def test_an_r_of_the_table_holds_all_from_there_on():
    table = Schedule.from_text("0F0 0F1 0R0 0R1 0B0 0B1")
    plan = Plan(schedule=table, num_microbatches=2, remat="none")
    assert memory(plan, layer(0, 8.0), batch=2) == 2 * 8


def test_narrow_values_take_fewer_bytes_and_weights_a_copy():
    plan = Plan("layers:1", schedule="gpipe", num_microbatches=4, remat="none")
    wide, narrow = (
        memory(dataclasses.replace(plan, compute_dtype=dtype), layer(10, 8.0))
        for dtype in (None, "bfloat16")
    )
    assert wide == 30 + 10 + 4 * 8 and narrow == 30 + 10 + 4 * 4 + 5


def test_what_is_computed_again_has_what_it_was_given_in_it():
    plan = Plan("layers:2", num_microbatches=4, remat="full")
    layers = [layer(10, 8.0), layer(10, 8.0)]
    # Two microbatches in flight have nothing that is given; one stage is computed again at a time.
    assert memory(plan, *layers) == 30 + 10 + 8
    assert memory(plan, *layers, place=1) == 30 + 10 + 8


def test_replicas_have_fewer_rows_and_slices_less_of_each():
    plan = Plan(
        "layers:1;data:2;model:2", "batch:data;heads:model", num_microbatches=2, remat="none"
    )
    layers = [layer(10, 4.0, split=2, summed=LINE)] * 4
    # Half of all weights and gradients, a quarter of the optimizer's state; of two rows half.
    found = memory(plan, *layers, batch=8, rules="heads:model")
    assert found == 20 + 20 + 20 + 4 * 2 * 4 / 2


def test_a_forward_pass_makes_no_gradients():
    """As of an embedding, which makes the gradient of its whole table, and nothing else."""
    table = layer(100, 0.0, working=Curve(((1, 100.0),)))
    blocks = [layer(1, 50.0, working=Curve(((1, 2.0),)))] * 3
    states = 103 * 3
    # Where the last block goes back, before anything that the table makes; then where it does.
    assert memory(Plan(remat="none"), table, *blocks, batch=1) == states + 150 + 3


def test_replicas_share_the_update():
    plan = Plan("layers:1;data:2", "batch:data", num_microbatches=2, remat="none")
    # A whole gradient each, and a half of what is made of it.
    assert memory(plan, layer(10, 0.1), update_memory=2.0) == 10 + 10 + 10 + 5
