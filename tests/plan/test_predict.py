"""Forecasts of a step that can be computed by hand, and laws for all plans."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PlanError
from pipemesh.mesh import LayoutRules
from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures, LayerFigures, Shares
from pipemesh.plan.network import Link
from pipemesh.plan.predict import predict
from pipemesh.schedule import Schedule
from tests.plan.stacks import figures, layer, line, with_ends


def test_one_f_one_b_is_its_formula():
    found = predict(Plan("layers:4", num_microbatches=8, remat="none"), figures(), 8)
    assert found.seconds == (8 + 3) * 3
    assert found.bubble == pytest.approx(3 / 11)
    assert found.parts["compute"] == 24 and found.parts["bubble"] == 9
    assert found.binds == "bubble"


def test_recomputation_is_a_forward_that_waits_for_no_gradient():
    plan = Plan("layers:4", num_microbatches=8, remat="full")
    # The last stage does eight of all; the first ones compute again before gradients come.
    assert predict(plan, figures(), 8).seconds == 3 * 1 + 8 * 4 + 3 * 2
    alone = Plan("layers:1", num_microbatches=8, remat="full")
    assert predict(alone, figures(), 8).seconds == 8 * 4 * 4


def test_devices_that_share_cores_have_no_bubble_to_lose():
    """Two devices on one core: all work one after the other, whatever the schedule."""
    for schedule in ("1f1b", "gpipe", "zb_h1"):
        plan = Plan("layers:2", schedule=schedule, num_microbatches=4, remat="none")
        found = predict(plan, figures(cores=1.0), 4)
        assert found.seconds == pytest.approx(4 * 4 * 3)
        assert found.bubble == pytest.approx(0, abs=1e-9)
    # As many cores as devices are a device each.
    plan = Plan("layers:2", num_microbatches=4, remat="none")
    assert predict(plan, figures(cores=2.0), 4).seconds == predict(plan, figures(), 4).seconds
    # An action that keeps half a core busy leaves the other half.
    half = figures(cores=1.0, loads={"F": 0.5, "B": 0.5})
    assert predict(plan, half, 4).seconds == predict(plan, figures(), 4).seconds


def test_replicas_share_cores_that_layers_keep_busy():
    found = Figures((layer(work={"F": line(), "B": line(2.0)}),) * 2, cores=2.0)
    alone = predict(Plan("layers:1", num_microbatches=1, remat="none"), found, 1)
    assert (alone.seconds, alone.work, alone.parts["bubble"]) == (4, 6, 0)
    # A device that is alone waits for none, whatever it leaves of its cores.
    assert alone.bubble == 0
    # Replicas: two forward passes at once, and then backward passes that want four cores.
    plan = Plan("layers:1;data:2", "batch:data", num_microbatches=1, remat="none")
    both = predict(plan, found, 2)
    assert (both.seconds, both.work, both.bubble) == (6, 12, 0)


def test_weights_of_a_device_are_updated_at_once():
    """On cores that devices share; the largest layer takes as long as it does."""
    plan = Plan("layers:1", num_microbatches=1, remat="none")
    parts = [
        predict(plan, figures(update=1.0, cores=cores), 4).parts["optimizer"]
        for cores in (1.0, 2.0, 16.0)
    ]
    assert parts == [4 * 8, 2 * 8, 8]
    layers = tuple(dataclasses.replace(each, trained=0.5) for each in figures().layers)
    found = predict(plan, Figures(layers, update=1.0), 4)
    assert found.parts["optimizer"] == 4 * 8 / 2


def test_replicas_on_shared_cores_gain_nothing():
    plan = Plan("layers:1;data:2", "batch:data", remat="none")
    assert predict(plan, figures(cores=1.0), 4).seconds == pytest.approx(4 * 4 * 3)
    assert predict(plan, figures(), 4).seconds == pytest.approx(4 * 4 * 3 / 2)


def test_tails_come_after_the_last_action():
    found = figures(update=0.5, fixed=7.0, transfer=Link(0.0, 1.0))
    plan = Plan("layers:1;data:2", "batch:data", remat="none")
    parts = predict(plan, found, 4).parts
    # 32 bytes of weights, of which each replica sends and gets a half twice and updates one.
    assert parts["gradients"] == pytest.approx(32)
    assert parts["optimizer"] == 8 and parts["fixed"] == 7
    assert predict(plan, found, 4, parts=False).parts == {}
    assert predict(plan, found, 4, parts=False).binds == ""


def test_sums_of_gradients_hide_behind_stages_that_still_compute():
    """Half of them, of two stages a device; on cores, which sum themselves, none."""
    plan = Plan("layers:2;data:2", "batch:data", "interleaved:2", num_microbatches=4, remat="none")
    alone, found = (
        [predict(plan, figures(transfer=Link(0.0, speed), cores=cores), 8) for cores in (None, 4.0)]
        for speed in (1e9, 8.0)
    )
    for free, slow, part in zip(alone, found, (1, 2), strict=True):
        # Layers of 8 bytes of weights, and of transfers of 2 bytes, which are not on the way.
        assert slow.parts["gradients"] == pytest.approx(part * 8 / 8, rel=1e-6)
        assert free.parts["gradients"] == pytest.approx(0, abs=1e-6)


def test_fetches_of_weights_delay_what_cannot_hide_them():
    """One a step where a device has one stage, as long as 4 bytes take; else one an action."""
    # The last number is the work of all fetches, less that of sums, which links halve with the cut.
    cases = [
        # Before the first action of the first stage; that of the second stage hides.
        ("layers:2;data:2", "1f1b", None, 4, 4 * 4 - 16),
        # All four devices copy 4 bytes at once.
        ("layers:2;data:2", "1f1b", 2.0, 8, 4 * 4),
        # Nothing hides where a device never waits: 4 actions of 2 microbatches and 2 stages each.
        ("layers:1;data:2", "looped_bfs:2", None, 8 * 4, 2 * 8 * 4 - 16),
        ("layers:1;data:2", "looped_bfs:2", 2.0, 8 * 4, 2 * 8 * 4),
    ]
    for mesh, schedule, cores, delay, work in cases:
        plan = Plan(mesh, "batch:data;embed:data", schedule, 2, remat="none")
        forecasts = []
        for cut in (0.0, 1.0):
            found = figures((1.0, 1.0), transfer=Link(0.0, 1.0), cores=cores)
            shares = {"embed:data": Shares(cut=cut, replicas=2)}
            layers = tuple(dataclasses.replace(each, shares=shares) for each in found.layers)
            forecasts.append(predict(plan, dataclasses.replace(found, layers=layers), 4))
        plain, fetching = forecasts
        assert fetching.parts["sums"] - plain.parts["sums"] == pytest.approx(delay)
        assert fetching.work - plain.work == pytest.approx(work)


def test_work_counts_all_cores():
    """However many there are; bubbles are none, and replicas each do their share."""
    plan = Plan("layers:2", num_microbatches=4, remat="none")
    for cores in (None, 1.0, 2.0):
        assert predict(plan, figures(cores=cores), 4).work == pytest.approx(4 * 4 * 3)
    shared = Plan("layers:1;data:2", "batch:data", remat="none")
    found = figures(update=0.5, fixed=7.0, action=0.25, transfer=Link(0.0, 1.0))
    # Of both: two actions, the sums of 32 bytes, half of the update; and what is done once.
    assert predict(shared, found, 4).work == pytest.approx(48 + 4 * 0.25 + 2 * 32 + 16 + 7)


def test_memory_of_places():
    found = figures(optimizer=2.0)
    plan = Plan("layers:2", num_microbatches=4, remat="none")
    # 2 layers a device: weights, gradients and twice that for the optimizer; 2 and 1 in flight.
    assert predict(plan, found, 4).memory == (16 * 4 + 2 * 8, 16 * 4 + 8)
    # The first stage is given nothing that it would keep; what is computed again is there once, and
    # what the second stage is given is a part of it.
    again = Plan("layers:2", num_microbatches=4, remat="full")
    assert predict(again, found, 4).memory == (16 * 4 + 8, 16 * 4 + 8)
    shared = Plan("layers:1;data:2", "batch:data", num_microbatches=2, remat="none")
    assert predict(shared, found, 4).memory == (32 * 3 + 16,)


def test_pending_bytes_are_held_between_i_and_w():
    """ZB-H2 holds what its W need, whether the rest is computed again or not."""
    shares = {"": Shares(2, whole=line(), pending_whole=line())}
    more = {"shares": shares, "pending": line(3.0)}
    times = {"F": line(), "B": line()}
    found = Figures((LayerFigures("a", times, 0, line(2.0), line(), **more),), rules="heads:model")
    table = Schedule.from_text("0: 0F0 0F1 0I0 0I1 0W0 0W1")
    plan = Plan(schedule=table, num_microbatches=2, remat="none")
    assert predict(plan, found, 2).memory == (6,)
    # Devices that share the layer each have what is whole, and half of the rest.
    shared = Plan("layers:1;model:2", "heads:model", table, num_microbatches=2, remat="none")
    assert predict(shared, found, 2).memory == (4,)


def test_working_memory_counts_for_two_layers_at_a_time():
    plan = Plan("layers:1", schedule="gpipe", num_microbatches=3, remat="none")
    found = Figures((layer(working=line(5.0)),) * 3)
    assert predict(plan, found, 3).memory == (3 * 3 + 2 * 5,)


def test_one_program_is_its_loop_and_what_all_devices_compute_before_and_behind():
    # Of four microbatches of two rows: forward, backward and recomputation of a stage of two layers
    # take (1 + 2 + 1) * 2 * 2 seconds, in five ticks. The ends compute eight rows at once.
    plan = Plan("layers:2", schedule="gpipe", num_microbatches=4, lowering="simd")
    whole = predict(plan, with_ends(), 8)
    assert whole.seconds == 5 * 16 + 8 * (2 + 6) * 3
    assert whole.work == 2 * whole.seconds
    assert whole.parts["bubble"] == 16 and whole.parts["imbalance"] == 8 * (2 + 6) * 3 / 2
    # Rules for `layers` split the ends over all devices.
    split = dataclasses.replace(plan, layout=LayoutRules.from_text("vocab:layers"))
    found = predict(split, with_ends(), 8)
    assert found.seconds == 5 * 16 + 8 * (2 + 6) * 3 / 2 and not found.supposed
    assert found.binds == "bubble" and found.bubble == pytest.approx(16 / found.seconds)
    assert max(found.memory) < max(whole.memory)
    # Two stages a device: ticks of half the length, 2 * 4 + 1 of them.
    twice = dataclasses.replace(split, schedule="looped_bfs:2")
    assert predict(twice, with_ends(), 8).seconds == 9 * 8 + 96
    # All devices are busy at all times, so on one core all work adds up.
    assert predict(split, with_ends(cores=1.0), 8).seconds == 2 * found.seconds
    # Each tick waits for its neighbour, and all devices get the outputs and the gradients.
    linked = predict(split, with_ends(transfer=Link(0.25, 1e30)), 8)
    assert linked.parts["transfers"] == 10 * 0.25 + 2 * 2 * 0.25


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"mesh": "layers:3"}, "3 stages as many of the layers that are alike .* there are 4"),
        ({"schedule": "1f1b"}, "schedule is '1f1b', but lowering=simd runs 'gpipe' or"),
        ({"remat": "none"}, "remat is 'none', but lowering=simd runs 'full'"),
        ({"boundaries": (0, 2, 6)}, r"lowering=simd runs \(0, 3, 6\)"),
    ],
)
def test_what_one_program_cannot_run_has_no_forecast(more, told):
    values = {"mesh": "layers:2", "schedule": "gpipe", "num_microbatches": 4} | more
    with pytest.raises(PlanError, match=told):
        predict(Plan(**values, lowering="simd"), with_ends(), 8)


plans = st.builds(
    lambda places, data, model, schedule, number, remat: Plan(
        f"layers:{places};data:{data};model:{model}",
        "batch:data;heads:model",
        schedule=schedule,
        num_microbatches=number,
        remat=remat,
        allow_idle=True,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 2]),
    st.sampled_from(["1f1b", "gpipe", "zb_h1", "zb_v"]),
    st.sampled_from([4, 8]),
    st.sampled_from(["none", "full"]),
)
programs = st.builds(
    lambda places, data, schedule, number, rules: Plan(
        f"layers:{places};data:{data}",
        f"batch:data{rules}",
        schedule=schedule,
        num_microbatches=number,
        lowering="simd",
        allow_idle=True,
    ),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2]),
    st.sampled_from(["gpipe", "looped_bfs:2"]),
    st.sampled_from([4, 8]),
    st.sampled_from(["", ";vocab:layers"]),
)


@settings(max_examples=40, deadline=None)
@given(plans | programs, st.sampled_from([None, 1.0, 2.0, 3.0]), st.floats(0, 0.1))
def test_parts_add_up_and_no_step_beats_its_work(plan, cores, latency):
    more = {"action": 0.05, "fixed": 0.5, "update": 0.01, "transfer": Link(latency, 50.0)}
    alike = {"split": 2, "cores": cores, "alike": (0, 8)}
    found = predict(plan, figures(8, **alike, **more), 16)
    assert sum(found.parts.values()) == pytest.approx(found.seconds)
    work = 8 * 16 * (3 if plan.remat.is_none else 4)
    assert found.seconds >= work / min(plan.mesh.num_devices, cores or 1e9) * (1 - 1e-9)
    free = predict(plan, figures(8, **alike), 16)
    assert free.seconds <= found.seconds * (1 + 1e-9)
    assert 0 <= found.bubble < 1
