"""`partition` as users call it: known cuts, what binds, and an error for everything wrong."""

import math
import time

import numpy as np
import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, Partition, partition


def cost_of(**fields):
    return LayerCost(forward=1, **fields)


def test_equal_layers_are_cut_evenly_where_lingvo_puts_one_and_three():
    assert partition([1, 1, 1, 1], 2) == Partition((0, 2, 4), (2.0, 2.0))


def test_the_list_on_which_block_partition_gives_701_and_101():
    assert partition([100] * 6 + [101] * 2, 2).stage_costs == (400.0, 402.0)


def test_the_list_on_which_block_partition_does_not_return():
    assert partition([5, 5, 5, 5, 20, 20], 5).stage_costs == (5, 5, 10, 20, 20)


def test_tenths_that_differ_in_floating_point_are_equal_here():
    # 0.1 + 0.2 is above 0.3 in floats, which would make 0.3 | 0.1 0.2 look uneven.
    plan = partition([0.1, 0.2, 0.3, 0.1, 0.1, 0.1], 3)
    assert plan.boundaries == (0, 2, 3, 6)


def test_arrays_lists_and_layer_costs_agree():
    costs = [3, 6, 9, 3]
    layers = [LayerCost(forward=cost / 3) for cost in costs]
    plans = [partition(given, 2) for given in (costs, np.asarray(costs, np.float32), layers)]
    assert plans[0] == plans[1] == plans[2]


def test_a_slow_device_gets_less():
    plan = partition([1] * 9, 3, speeds=[1, 0.25, 1])
    assert plan.boundaries == (0, 4, 5, 9)
    assert plan.stage_costs == (4.0, 4.0, 4.0)


def test_a_fast_device_late_in_the_pipeline_does_not_mislead_greedy_cuts():
    # Longest stages first leave the slow third device with the layer of 5, which costs it 5.
    plan = partition([0, 0, 0, 2, 5, 0], 4, speeds=[1, 1, 1, 3])
    assert plan.bottleneck == 2.0


def test_cheap_boundaries_are_preferred_over_even_compute():
    layers = [cost_of(boundary_bytes=bytes_) for bytes_ in (100, 100, 1, 1)]
    assert partition(layers, 2).boundaries == (0, 2, 4)
    plan = partition(layers, 2, bandwidth=10)
    assert plan.boundaries == (0, 3, 4)
    assert plan.stage_costs == pytest.approx((9.1, 3.1))
    assert plan.binding == ("bandwidth",)
    assert partition(layers, 2, bandwidth=10, overlap_transfers=True).stage_costs == (9.0, 3.0)


def test_recomputation_costs_a_forward_pass_except_where_the_policy_spares_it():
    layers = [LayerCost(1, 2)] * 2
    assert partition(layers, 2, remat="full").stage_costs == (4.0, 4.0)
    assert partition(layers, 2, remat="except_last").stage_costs == (4.0, 3.0)
    late = partition(layers, 2, remat="except_last", schedule="gpipe", num_microbatches=4)
    # Each stage's last microbatch turns around at once.
    assert late.stage_costs == (3.75, 3.75)


def test_activations_in_flight_push_layers_towards_the_end():
    layers = [cost_of(parameter_bytes=1, activation_bytes=2)] * 6
    plan = partition(layers, 3, memory_limit=16, num_microbatches=8)
    assert plan.boundaries == (0, 1, 3, 6)
    assert plan.stage_memory == (9.0, 14.0, 15.0)
    assert plan.binding == ("memory_limit",)
    assert partition(layers, 3, num_microbatches=8).stage_memory == (18.0, 14.0, 10.0)


def test_virtual_stages_balance_devices_and_not_stages():
    plan = partition([4, 1, 1, 4, 1, 1], 4, num_virtual_stages=2)
    assert plan.device_costs == (6.0, 6.0)
    assert plan.bottleneck == 6.0
    assert plan.num_devices == 2


def test_virtual_stages_of_equal_layers_are_even_too():
    assert partition([1] * 8, 4, num_virtual_stages=2).stage_costs == (2.0,) * 4


def test_a_search_for_virtual_stages_that_grows_too_large_says_so(monkeypatch):
    monkeypatch.setattr("pipemesh.partition.search.interleaved.MOST_STATES", 100)
    with pytest.raises(PartitionError, match="limit of 100 states; narrow it with min_layers"):
        partition([1.0] * 40, 12, num_virtual_stages=3)


@pytest.mark.parametrize(
    ("options", "binding"),
    [
        ({}, ("layer 2",)),
        ({"same_stage": [[2, 3]]}, ("same_stage",)),
        ({"fixed": [1, 2]}, ("fixed",)),
        ({"fixed": {1: 4}}, ("fixed",)),
        ({"same_stage": [[2, 3]], "fixed": {1: 4}}, ("fixed",)),
        ({"max_layers": 2}, ("max_layers",)),
        ({"min_layers": 2}, ("min_layers",)),
    ],
)
def test_what_binds_is_what_would_have_to_give_way(options, binding):
    assert partition([1, 1, 4, 1, 1, 1], 3, **options).binding == binding


def test_nothing_binds_where_only_the_ends_of_layers_are_in_the_way():
    assert partition([2, 2, 2], 2).binding == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_layers": 2}, "breaks max_layers=2: stage 1 has 3"),
        ({"min_layers": 2}, "breaks min_layers=2: stage 0 has 1"),
        ({"fixed": [2]}, "does not begin at layer 2"),
        ({"fixed": {1: 2}}, "does not begin at layer 2"),
        ({"same_stage": [[0, 1]]}, r"it cuts \[0, 1\] at layer 1"),
        (
            {"memory_limit": 8, "num_microbatches": 1},
            "device 1 needs 9 B, limit is 8 B",
        ),
    ],
)
def test_heuristics_are_refused_where_they_break_an_option(options, message):
    layers = [cost_of(parameter_bytes=1)] * 4
    with pytest.raises(PartitionError, match=f"cut of method='lingvo'.*{message}"):
        partition(layers, 2, method="lingvo", **options)


@pytest.mark.parametrize(
    ("costs", "num_stages", "options", "message"),
    [
        ([], 1, {}, "non-empty"),
        (3, 1, {}, "must be a sequence"),
        ("12", 1, {}, "must be a sequence"),
        ([1, float("nan")], 1, {}, r"costs\[1\] is nan"),
        ([1, -1], 1, {}, r"costs\[1\] is -1.0, but every cost must be zero or more"),
        ([1, math.inf], 1, {}, r"costs\[1\] is inf, but every cost must be finite"),
        ([1, "a"], 1, {}, r"costs\[1\] is 'a', but must be a number"),
        ([1, True], 1, {}, r"costs\[1\] is True, but must be a number"),
        ([1, None], 1, {}, r"costs\[1\] is None, but must be a number"),
        ([[1, 2], [3, 4]], 1, {}, r"costs\[0\] is \[1, 2\]"),
        (np.ones((2, 2)), 1, {}, r"shape \(2, 2\)"),
        (np.asarray(["a"]), 1, {}, "flat sequence of numbers"),
        ([0, 0], 1, {}, "costs of all 2 layers are zero"),
        ([1e308, 1e308], 1, {}, "sum of the costs is too large"),
        ([10**400], 1, {}, "too large for a float"),
        ([1, LayerCost(1)], 1, {}, "give numbers only or LayerCost only"),
        ([1, 1], 3, {}, "2 layers allow 1 to 2"),
        ([1, 1], 0, {}, "num_stages is 0"),
        ([1, 1], 1.0, {}, "must be a whole number"),
        ([1, 1], True, {}, "must be a whole number"),
        ([1] * 6, 3, {"num_virtual_stages": 2}, "use 2 or 4 stages"),
        ([1] * 6, 2, {"speeds": [1]}, "1 numbers for 2 devices"),
        ([1] * 6, 2, {"speeds": [1, 0]}, r"speeds\[1\] is 0, but must be a finite number above"),
        ([1] * 6, 2, {"bandwidth": 1}, "bandwidth needs costs that say boundary_bytes"),
        ([1] * 6, 2, {"memory_limit": 1}, "memory_limit needs costs that say parameter_bytes"),
        ([1] * 6, 2, {"remat": "full"}, "needs costs that say forward"),
        ([1] * 6, 2, {"remat": "ful"}, "did you mean 'full'"),
        ([1] * 6, 2, {"method": "exakt"}, "did you mean 'exact'"),
        ([1] * 6, 2, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        ([1] * 6, 2, {"overlap_transfers": True}, "without bandwidth there are no transfers"),
        ([1] * 6, 2, {"num_microbatches": 0}, "num_microbatches is 0, but must be 1 or more"),
        ([1] * 6, 2, {"min_layers": 4}, "use min_layers=3 or 1 stages"),
        ([1] * 6, 2, {"max_layers": 2}, "use max_layers=3 or 3 stages"),
        ([1] * 6, 2, {"max_layers": 3, "min_layers": 4}, "use min_layers=3"),
        ([1] * 6, 1, {"max_layers": 2, "min_layers": 3}, "max_layers is 2, but min_layers is 3"),
        ([1] * 6, 2, {"same_stage": [0, 1]}, r"same_stage\[0\] is 0, but must be a group"),
        ([1] * 6, 2, {"same_stage": [[0, 6]]}, "layer indices from 0 to 5"),
        ([1] * 6, 2, {"same_stage": [[0]]}, "two or more layer indices"),
        ([1] * 6, 3, {"same_stage": [[0, 4]]}, "leaves only 2 pieces of the 6 layers for 3 stages"),
        ([1] * 6, 2, {"fixed": [0]}, "must be 1 or more"),
        ([1] * 6, 2, {"fixed": [6]}, "must be a layer from 1 to 5"),
        ([1] * 6, 2, {"fixed": [1, 2]}, "use 3 stages"),
        ([1] * 6, 2, {"fixed": {2: 3}}, "stages go from 1 to 1"),
        ([1] * 6, 3, {"fixed": {1: 3, 2: 3}}, "leaves 0 layers for the 1 stages between"),
        ([1] * 6, 4, {"fixed": {1: 5}}, "leaves 1 layers for the last 3 stages"),
        ([1] * 6, 2, {"fixed": [3], "same_stage": [[2, 3]]}, "keeps the layers 2 to 3 together"),
        ([LayerCost(1)] * 4, 2, {"memory_limit": 1}, "needs num_microbatches"),
        (
            [1] * 4,
            4,
            {"num_virtual_stages": 2, "schedule": "one_f_one_b"},
            "one stage on each device",
        ),
    ],
)
def test_bad_input_names_what_was_given_and_what_is_allowed(costs, num_stages, options, message):
    with pytest.raises(PartitionError, match=message):
        partition(costs, num_stages, **options)


def test_a_hundred_thousand_layers_over_a_thousand_stages():
    random = np.random.default_rng(0)
    costs = random.random(100_000)
    begin = time.perf_counter()
    plan = partition(costs, 1000)
    # The benchmark holds it to 0.5 s; a busy machine must not fail a test.
    assert time.perf_counter() - begin < 5
    assert plan.bottleneck < costs.sum() / 1000 + 1
    assert all(plan.stages)


def test_a_long_run_of_layers_that_cost_nothing():
    plan = partition(np.r_[np.zeros(20_000), 1, np.zeros(20_000)], 500)
    assert plan.bottleneck == 1
    assert all(plan.stages)


def test_one_huge_layer_leaves_the_rest_even():
    costs = np.r_[np.ones(5000), 4000, np.ones(5000)]
    plan = partition(costs, 11)
    assert sorted(plan.stage_costs) == [1000.0] * 10 + [4000.0]
    assert plan.binding == ("layer 5000",)


@pytest.mark.parametrize("scale", [5e-324, 1e-310, 1e-300, 1e300])
def test_very_small_and_very_large_costs(scale):
    assert partition(np.asarray([3, 1, 1, 3]) * scale, 2).boundaries == (0, 2, 4)
    many = np.tile([3, 1, 1, 3], 2000) * scale
    assert partition(many, 4).boundaries == (0, 2000, 4000, 6000, 8000)


def test_virtual_stages_with_numbers_beyond_floats():
    # Speeds and costs with long digits have a common unit of hundreds of digits.
    random = np.random.default_rng(0)
    plan = partition(random.random(24), 8, num_virtual_stages=2, speeds=random.random(4) + 0.5)
    assert plan.balance > 0.9


def test_what_two_layers_share_is_kept_once_in_a_stage_and_by_both_across_a_cut():
    layers = [LayerCost(1, activation_bytes=5, shared_bytes=2)] * 4
    # Nothing is in front of the first layer, so the first stage shares once and the second too.
    plan = partition(layers, 2, in_flight=(3, 1))
    assert plan.stage_memory == (3 * 8.0, 8.0)
    with pytest.raises(PartitionError, match="shared_bytes of layer 'a' is 3, but must be among"):
        LayerCost(1, activation_bytes=2, shared_bytes=3, name="a")


def test_what_layers_share_is_held_by_a_stage_that_begins_between_them_under_remat_too():
    layers = [
        LayerCost(0, boundary_bytes=5),
        LayerCost(0, activation_bytes=6, shared_bytes=1),
        LayerCost(1),
    ]
    options = {"num_microbatches": 3, "schedule": "gpipe", "remat": "full"}
    options |= {"optimizer_bytes_per_parameter_byte": 0, "fixed": [1, 2]}
    # Three inputs of 5 bytes, and of one microbatch all 6.
    assert partition(layers, 3, memory_limit=21, **options).boundaries == (0, 1, 2, 3)
    with pytest.raises(PartitionError, match="needs 21 B, limit is 20 B"):
        partition(layers, 3, memory_limit=20, **options)
