"""Stages of a plan: what their actions take and hold."""

import dataclasses

import pytest

from pipemesh.errors import PlanError
from pipemesh.plan import Plan, Remat, predict
from pipemesh.plan.figures import Curve, Figures, LayerFigures, Shares, all_reduces
from pipemesh.plan.network import Link
from pipemesh.plan.stages import (
    action_costs,
    action_loads,
    cut_evenly,
    device_memory,
    even_costs,
    even_loads,
    layer_seconds,
    stages_of,
)
from pipemesh.schedule import Schedule
from tests.plan.stacks import figures, layer, line

UNEVEN = (1.0, 1.0, 1.0, 3.0)


def test_stages_are_those_of_the_boundaries():
    plan = Plan("layers:2", num_microbatches=2, boundaries=(0, 1, 4))
    stages = stages_of(plan, figures(UNEVEN), batch=4)
    assert [[layer.name for layer in own] for own in stages.layers] == [["l0"], ["l1", "l2", "l3"]]
    assert (stages.rows, stages.replicas, stages.groups, stages.remat) == (2, 1, (1, 1), Remat.FULL)


def test_without_boundaries_stages_are_equally_long():
    stages = stages_of(Plan("layers:2"), figures(UNEVEN), batch=4)
    assert [len(own) for own in stages.layers] == [3, 1]


def test_replicas_have_fewer_rows_and_groups_less_of_each():
    plan = Plan(
        "layers:1;data:2;model:2", "batch:data;heads:model", num_microbatches=2, remat="none"
    )
    stages = stages_of(plan, figures(UNEVEN, split=4), batch=8)
    assert (stages.rows, stages.replicas, stages.groups) == (2, 2, (2,))
    assert stages.weights(0) == 4 * 8 / 2
    costs = action_costs(stages, figures(UNEVEN, split=4), sums=False)
    # Two rows, half of each layer.
    assert costs.forward == (6.0,) and costs.backward == (12.0,)


def test_a_layer_that_cannot_be_split_is_computed_by_all():
    plan = Plan("layers:1;model:2", "heads:model", allow_idle=True)
    stages = stages_of(plan, figures(UNEVEN), batch=1)
    assert stages.weights(0) == 4 * 8
    assert action_costs(stages, figures(UNEVEN)).forward == (6.0,)


def test_actions_cost_something_themselves():
    plan = Plan("layers:2", num_microbatches=4, remat="none")
    found = figures((1.0, 1.0), action=0.5, transfer=Link(0.25, 1.0))
    costs = action_costs(stages_of(plan, found, 4), found)
    assert costs.forward == (1.5, 1.5) and costs.backward == (2.5, 2.5)
    assert costs.input_grad == costs.weight_grad == (1.5, 1.5)
    # Two bytes of outputs at one a second.
    assert costs.per_stage(2).transfer[0] == 2.25
    free = action_costs(stages_of(plan, found, 4), found, transfers=False)
    assert free.per_stage(2).transfer[0] == 0


def test_recomputation_comes_before_the_first_action_backward():
    plan = Plan("layers:1", schedule="1f1b", remat="full")
    found = figures((1.0,))
    stages = stages_of(plan, found, 1)
    costs = action_costs(stages, found)
    assert costs.backward == (2.0,) and costs.input_grad == (1.0,) and costs.weight_grad == (1.0,)
    assert costs.recompute == (1.0,) and str(stages.run) == "0: 0F0 0R0 0B0"
    halves = stages_of(Plan("layers:2", schedule="zb_h1", remat="full"), figures(UNEVEN), 1)
    assert str(halves.run) == "0: 0F0 0R0 0I0 0W0\n1: 1F0 1R0 1I0 1W0"


def test_the_last_layer_of_a_stage_computes_less_again():
    """Its own results are only handed on."""
    plan = Plan("layers:2", remat="full", boundaries=(0, 2, 3))
    found = figures((1.0, 1.0, 1.0))
    layers = tuple(dataclasses.replace(layer, again=0.5) for layer in found.layers)
    found = dataclasses.replace(found, layers=layers)
    costs = action_costs(stages_of(plan, found, 1), found)
    assert costs.recompute == (1.5, 0.5) and costs.forward == (2.0, 1.0)


def test_sums_wait_for_all():
    """A forward pass has one, its backward one more, and recomputation another."""
    link = Link(0.0, 1.0)
    found = figures((1.0,), split=2, transfer=link)
    each = link.all_reduce(2, 6.0)
    for remat, times in (("none", 1), ("full", 2)):
        plan = Plan("layers:1;model:2", "heads:model", remat=remat)
        stages = stages_of(plan, found, 1)
        with_sums, without = action_costs(stages, found), action_costs(stages, found, sums=False)
        assert with_sums.forward[0] - without.forward[0] == pytest.approx(each)
        again = with_sums.recompute[0] - without.recompute[0] if remat == "full" else 0.0
        assert with_sums.backward[0] - without.backward[0] == pytest.approx(each)
        assert again == pytest.approx((times - 1) * each)
        assert with_sums.weight_grad == without.weight_grad


def test_seconds_of_layers_are_forward_and_backward():
    assert layer_seconds(figures((1.0, 3.0)), rows=2, group=1, again=False) == [6.0, 18.0]
    assert layer_seconds(figures((1.0, 3.0)), rows=2, group=1, again=True) == [8.0, 24.0]


def test_curves_are_asked_for_the_rows_of_a_replica():
    bent = Curve(((1, 3.0), (2, 4.0)))
    found = Figures((LayerFigures("a", {"F": bent, "B": bent}, 0, bent, bent),))
    costs = action_costs(stages_of(Plan(num_microbatches=2, remat="none"), found, 4), found)
    assert costs.forward == (4.0,)


def test_cuts_know_which_device_has_which_stages():
    # On a V the first and the last stage are of one device.
    assert cut_evenly((4.0, 1.0, 1.0, 1.0, 1.0, 4.0), (0, 1, 1, 0))[1] == 1
    assert cut_evenly((1.0, 1.0, 1.0, 3.0), (0, 1)) == (0, 3, 4)


def test_even_costs_are_as_much_work():
    plan = Plan("layers:2", num_microbatches=4)
    found = figures(UNEVEN)
    costs = action_costs(stages_of(plan, found, 4), found)
    even = even_costs(costs, 2)
    assert 2 * even.forward == sum(costs.forward)
    assert 2 * even.backward == sum(costs.backward)


@pytest.mark.parametrize(
    ("plan", "batch", "told"),
    [
        (Plan("layers:2", lowering="simd"), 4, "lowering=simd has no actions"),
        (Plan("layers:2", num_microbatches=3), 4, "does not divide"),
        (Plan("layers:8"), 8, "8 stages"),
    ],
)
def test_plans_without_stages_are_errors(plan, batch, told):
    with pytest.raises(PlanError, match=told):
        stages_of(plan, figures(UNEVEN), batch)


def test_loads_follow_from_work_and_time():
    """A layer whose backward pass keeps two cores busy, and one that keeps one busy."""
    wide, thin = layer(work={"F": line(), "B": line(2.0)}), layer()
    found = Figures((wide, thin, wide), action=1.0, loads={"B": 1.5})
    plan = Plan("layers:2", num_microbatches=1, boundaries=(0, 2, 3), remat="none")
    stages = stages_of(plan, found, 1)
    costs = action_costs(stages, found)
    loads = action_loads(stages, found, costs)
    # Of a second each of the action and of either layer; what is not known of a layer is one core.
    assert loads["B"] == [4 / 3, 3 / 2] and loads["F"] == [1, 1]
    assert even_loads(loads, costs, 2)["B"] == pytest.approx([7 / 5] * 2)
    # Of layers of which nothing is known figures say something for all.
    known = Figures((thin, thin), loads={"B": 1.5})
    stages = stages_of(Plan("layers:2", remat="none"), known, 1)
    assert action_loads(stages, known, action_costs(stages, known))["B"] == [1.5, 1.5]


def keeping(weights, kept, **more):
    times = {"F": line(), "B": line()}
    return LayerFigures("a", times, weights, line(kept), line(), **more)


def table(text):
    schedule = Schedule.from_text(text)
    return {"schedule": schedule, "num_microbatches": schedule.num_microbatches}


FOUR, GPIPE = {"num_microbatches": 4}, {"schedule": "gpipe", "num_microbatches": 4}
SPLIT = {"mesh": "layers:1;data:2;model:2", "layout": "batch:data;heads:model"}
REPLICAS = {"mesh": "layers:1;data:2", "layout": "batch:data"}
SPLIT_LAYER = keeping(10, 4.0, shares={"": all_reduces(2, line())})
W_LATE = "0F0 0F1 0I0 0I1 0W0 0W1\n1F0 1I0 1F1 1I1 1W0 1W1"
# Weights and what the optimizer keeps of them, of a layer with ten bytes of weights.
ONE = 10 + 20
MEMORY = [
    # A layer's gradient is there before what it kept is gone; with few gradients the peak is the
    # first forward pass. Of several microbatches all but the first find the gradients.
    ("one", {}, [keeping(10, 10.0)] * 3, 3 * ONE + 4 * 10),
    ("small gradients", {}, [keeping(1, 10.0)] * 3, 3 * 3 + 30 + 1),
    ("all at once", GPIPE, [keeping(10, 10.0)] * 3, 3 * ONE + 4 * 30 + 10),
    ("one by one", FOUR, [keeping(10, 10.0)] * 3, 3 * ONE + 30 + 30),
    # The first gradients become the sums.
    ("first sums", {}, [keeping(10, 5.0, working=line(12.0))], ONE + 5 + 12),
    ("later sums", FOUR, [keeping(10, 5.0, working=line(12.0))], ONE + 10 + 5 + 12),
    # Both microbatches are pending when the first W begins, and its half has the weights.
    (
        "W sums",
        table("0: 0F0 0F1 0I0 0I1 0W0 0W1"),
        [keeping(10, 2.0, pending=line(3.0))],
        ONE + 16,
    ),
    ("no update", FOUR, [keeping(10, 1.0)], ONE + 10 + 1),
    ("large update", FOUR | {"update_memory": 1.5}, [keeping(10, 1.0)], ONE + 15),
    # Each stage follows its own policy. Two microbatches in flight have nothing that is given; one
    # stage is computed again at a time.
    ("full, none", FOUR | {"remat": "full,none"}, [keeping(10, 8.0)] * 2, (ONE + 18, ONE + 18)),
    ("none, full", FOUR | {"remat": "none,full"}, [keeping(10, 8.0)] * 2, (ONE + 26, ONE + 18)),
    ("full", FOUR | {"remat": "full"}, [keeping(10, 8.0)] * 2, (ONE + 18, ONE + 18)),
    # A W that computes again was left gradients alone: half of what is pending, and what the stage
    # was given, a byte. The first is pending while the second one's stage is computed again.
    ("W kept", table(W_LATE) | {"remat": "full"}, [keeping(0, 8.0)] * 2, (None, 2 * 8)),
    ("W again", table(W_LATE) | {"remat": "twice"}, [keeping(0, 8.0)] * 2, (None, 1 + 8 / 2 + 8)),
    # An R of the table holds all from there on.
    ("R", table("0F0 0F1 0R0 0R1 0B0 0B1"), [keeping(0, 8.0)], 2 * 8),
    # Narrow values take fewer bytes, and weights a copy.
    ("wide", GPIPE, [keeping(10, 8.0)], ONE + 10 + 4 * 8),
    ("narrow", GPIPE | {"compute_dtype": "bfloat16"}, [keeping(10, 8.0)], ONE + 10 + 4 * 4 + 5),
    # Half as much state as figures say of layers, and none.
    (
        "states of layers",
        {},
        [dataclasses.replace(keeping(10, 10.0), optimizer=state) for state in (1.0, 0.0, None)],
        30 + 10 + 20 + 4 * 10,
    ),
    # What is not trained has neither gradients nor state.
    ("frozen", {}, [keeping(10, 5.0, trained=share) for share in (0.0, 0.5)], 20 + 2 * 5 + 10 + 5),
    # Half of all weights and gradients, a quarter of the optimizer's state; of two rows half.
    ("slices", SPLIT | {"num_microbatches": 2, "batch": 8}, [SPLIT_LAYER] * 4, 60 + 4 * 2 * 4 / 2),
    # An embedding makes the gradient of its whole table, but not in its forward pass: the peak is
    # where the last block goes back.
    (
        "embedding",
        {},
        [keeping(100, 0.0, working=line(100.0)), *[keeping(1, 50.0, working=line(2.0))] * 3],
        103 * 3 + 150 + 3,
    ),
    # Replicas have a whole gradient each, and half of what the update makes of it.
    (
        "shared update",
        REPLICAS | {"num_microbatches": 2, "update_memory": 2.0},
        [keeping(10, 0.1)],
        30 + 5,
    ),
]


@pytest.mark.parametrize(
    ("values", "layers", "held"), [row[1:] for row in MEMORY], ids=[row[0] for row in MEMORY]
)
def test_devices_hold_what_is_computed_by_hand(values, layers, held):
    """Bytes of a device of each place, or of the only one; None is not looked at."""
    values = {"remat": "none", **values}
    held = held if isinstance(held, tuple) else (held,)
    rows = values.get("num_microbatches", 1)
    more = {name: values.pop(name) for name in ("update_memory",) if name in values}
    batch = values.pop("batch", rows * (2 if "data" in values.get("mesh", "") else 1))
    plan = Plan(values.pop("mesh", f"layers:{len(held)}"), **values)
    known = Figures(tuple(layers), optimizer=2.0, rules="heads:model", **more)
    stages = stages_of(plan, known, batch)
    for place, wanted in enumerate(held):
        assert wanted is None or device_memory(stages, known, place) == wanted


def test_homes_may_have_different_sizes():
    """Four devices take four times the work of one in the same time."""
    found = figures((4.0, 1.0), split=4)
    plan = Plan("layers:2;model:4,1", "heads:model", num_microbatches=8, remat="none")
    stages = stages_of(plan, found, 8)
    assert (stages.groups, stages.home_sizes) == ((4, 1), (4, 1))
    assert [len(layers) for layers in stages.layers] == [1, 1]
    costs = action_costs(stages, found, sums=False)
    assert costs.forward == (1.0, 1.0) and costs.backward == (2.0, 2.0)
    assert (stages.weights(0), stages.weights(1)) == (2.0, 8.0)
    # The larger home gets more of equal layers.
    wide = stages_of(plan, figures((1.0,) * 10, split=4), 8)
    assert [len(layers) for layers in wide.layers] == [8, 2]


def test_work_of_unequal_homes_adds_up():
    free = dataclasses.replace(figures((4.0, 1.0), split=4), transfer=Link(0.0, 1e30))
    plan = Plan("layers:2;model:4,1", "heads:model", num_microbatches=8, remat="none")
    even = predict(plan, free, 8)
    assert even.seconds == pytest.approx((8 + 1) * 3) and even.bubble == pytest.approx(1 / 9)
    assert even.work == pytest.approx(8 * 3 * 5.0)
    shared = predict(plan, dataclasses.replace(free, cores=5.0), 8)
    assert shared.seconds == pytest.approx(even.seconds)
    one = predict(plan, dataclasses.replace(free, cores=1.0), 8)
    assert one.seconds == pytest.approx(8 * 3 * 5.0) and one.bubble == pytest.approx(0, abs=1e-9)


CUT = "batch:data;embed:data"


@pytest.mark.parametrize(
    ("mesh", "schedule", "cores", "fetches", "more"),
    [
        # Two stages, each alone: a fetch of half of 8 bytes over a link of one a second, at time 0.
        ("layers:2;data:2", "1f1b", None, (4, 4), {}),
        # Four devices copy at once, on two cores.
        ("layers:2;data:2", "1f1b", 2.0, (8, 8), {}),
        # Two stages of one home.
        ("layers:1;data:2", "looped_bfs:2", None, (4, 4), {}),
        ("layers:1;data:2", "looped_bfs:2", 2.0, (0, 0), {"forward": 4, "backward": 4}),
    ],
)
def test_fetches_of_cut_weights_are_beside_actions(mesh, schedule, cores, fetches, more):
    """But cores that devices share copy the weights of an action as part of it."""
    found = figures((1.0, 1.0), transfer=Link(0.0, 1.0), cores=cores)
    shares = {"": Shares(), "embed:data": Shares(cut=1.0, replicas=2)}
    cut = dataclasses.replace(
        found, layers=tuple(dataclasses.replace(each, shares=shares) for each in found.layers)
    )
    plan = Plan(mesh, CUT, schedule, 2, remat="none")
    stages = stages_of(plan, cut, 4)
    costs, plain = action_costs(stages, cut), action_costs(stages, cut, sums=False)
    assert costs.all_gather == fetches and plain.all_gather == (0, 0)
    for kind in ("forward", "backward"):
        for one, other in zip(getattr(costs, kind), getattr(plain, kind), strict=True):
            assert one == other + more.get(kind, 0)
