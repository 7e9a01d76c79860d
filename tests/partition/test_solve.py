"""`partition` as users call it: known cuts, what binds, and why there is no cut."""

import re
import time

import numpy as np
import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.schedule import zb_v


@pytest.mark.parametrize(
    ("costs", "stages", "options", "stage_costs"),
    [
        # Block partition makes 701 and 101 of it.
        ([100] * 6 + [101] * 2, 2, {}, (400.0, 402.0)),
        # And on this one it never returns.
        ([5, 5, 5, 5, 20, 20], 5, {}, (5, 5, 10, 20, 20)),
        # 0.1 + 0.2 is above 0.3 in floats, which would make 0.3 | 0.1 0.2 look uneven.
        ([0.1, 0.2, 0.3, 0.1, 0.1, 0.1], 3, {}, pytest.approx((0.3, 0.3, 0.3))),
        # Longest stages first leave the slow third device with the layer of 5, which costs it 5.
        ([0, 0, 0, 2, 5, 0], 4, {"speeds": [1, 1, 1, 3]}, pytest.approx((0, 0, 2, 5 / 3))),
    ],
)
def test_known_cuts(costs, stages, options, stage_costs):
    assert partition(costs, stages, **options).stage_costs == stage_costs


def test_a_search_for_virtual_stages_may_grow_too_large(monkeypatch):
    monkeypatch.setattr("pipemesh.partition.virtual_stages.MOST_STATES", 100)
    with pytest.raises(PartitionError, match="limit of 100 states; narrow it with min_layers"):
        partition([1.0] * 40, 12, num_virtual_stages=3)


def test_a_cut_is_kept_if_the_search_for_binding_gives_up():
    """Without transfers, which take longest here, no state can be ruled out."""
    rng = np.random.default_rng(1)
    costs = [LayerCost(1e-6 * rng.random(), boundary_bytes=1e6 * rng.random()) for _ in range(100)]
    options = {"num_virtual_stages": 2, "bandwidth": 1e9, "overlap_transfers": True}
    assert partition(costs, 8, **options).binding == ("perhaps bandwidth",)


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
def test_options_that_bind_are_named(options, binding):
    assert partition([1, 1, 4, 1, 1, 1], 3, **options).binding == binding


def test_costly_boundaries_bind():
    layers = [LayerCost(1, boundary_bytes=bytes_) for bytes_ in (100, 100, 1, 1)]
    assert partition(layers, 2, bandwidth=10).binding == ("bandwidth",)
    assert partition([2, 2, 2], 2).binding == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_layers": 2}, "breaks max_layers=2: stage 1 has 3"),
        ({"min_layers": 2}, "breaks min_layers=2: stage 0 has 1"),
        ({"fixed": [2]}, "does not begin at layer 2"),
        ({"fixed": {1: 2}}, "does not begin at layer 2"),
        ({"same_stage": [[0, 1]]}, r"it cuts \[0, 1\] at layer 1"),
        ({"memory_limit": 8, "num_microbatches": 1}, "device 1 needs 9 B, limit is 8 B"),
    ],
)
def test_heuristics_are_refused_where_they_break_an_option(options, message):
    layers = [LayerCost(1, parameter_bytes=1)] * 4
    with pytest.raises(PartitionError, match=f"cut of method='lingvo'.*{message}"):
        partition(layers, 2, method="lingvo", **options)


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
    plan = partition(np.r_[np.zeros(600), 1, np.zeros(600)], 30)
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


def test_uniform_counts_differ_by_one_at_most():
    plan = partition([9] + [1] * 9, 4, method="uniform")
    assert (plan.boundaries, plan.method) == ((0, 3, 6, 8, 10), "uniform")


def test_the_rule_is_that_of_lingvo_itself():
    pytest.importorskip("pipemesh.layers")
    gpipe = pytest.importorskip("lingvo.core.gpipe")
    from lingvo.core import base_layer, py_utils, tshape

    class Fake(base_layer.BaseLayer):
        @classmethod
        def Params(cls):
            params = super().Params()
            params.Define("flops", 0, "What the layer claims to cost.")
            return params

        @classmethod
        def FPropMeta(cls, p, *shapes):
            return py_utils.NestedMap(flops=p.flops, out_shapes=shapes)

    random = np.random.default_rng(0)
    for _ in range(40):
        costs = random.integers(1, 30, random.integers(2, 20)).tolist()
        stages = int(random.integers(1, min(len(costs), 6) + 1))
        layers = [Fake.Params().Set(flops=cost) for cost in costs]
        cells = gpipe.PartitionSequentialLayers(layers, stages, tshape.Shape([1]))
        plan = partition(costs, stages, method="lingvo")
        assert [len(cell.sub) for cell in cells] == [len(layers) for layers in plan.stages]


GIB = 2**30
LAYERS = [
    LayerCost(1, parameter_bytes=GIB / 2, activation_bytes=GIB / 4, name=f"block{index}")
    for index in range(16)
]


def message_of(*args, **options):
    with pytest.raises(PartitionError) as caught:
        partition(*args, **options)
    return str(caught.value)


def test_memory_errors_name_the_stage_and_nearest_settings():
    options = {"num_microbatches": 8, "memory_limit": 8 * GIB}
    text = message_of(LAYERS, 4, **options)
    assert re.search(r"stage \d \(layers \d+ to \d+\) needs \d+\.\d GiB, limit is 8\.0 GiB", text)
    stages = int(re.search(r"from (\d+) stages", text)[1])
    partition(LAYERS, stages, **options)
    with pytest.raises(PartitionError):
        partition(LAYERS, stages - 1, **options)
    limit = float(re.search(r"memory_limit of (\d+\.\d) GiB", text)[1])
    partition(LAYERS, 4, num_microbatches=8, memory_limit=limit * GIB)
    with pytest.raises(PartitionError):
        partition(LAYERS, 4, num_microbatches=8, memory_limit=(limit - 0.1) * GIB)
    assert "remat='full'" in text
    partition(LAYERS, 4, remat="full", **options)


@pytest.mark.parametrize("options", [{}, {"num_virtual_stages": 2}, {"remat": "full"}])
def test_the_limit_that_is_named_is_the_least_that_works(options):
    layers = [LayerCost(1.0, parameter_bytes=10, activation_bytes=5, boundary_bytes=1)] * 8
    stages = 2 * options.get("num_virtual_stages", 1)
    text = message_of(layers, stages, num_microbatches=8, memory_limit=30, **options)
    limit = int(re.search(r"memory_limit of (\d+) B", text)[1])
    partition(layers, stages, num_microbatches=8, memory_limit=limit, **options)
    message_of(layers, stages, num_microbatches=8, memory_limit=limit - 1, **options)


def test_more_microbatches_of_the_same_batch_help_1f1b():
    options = {"memory_limit": 8 * GIB}
    text = message_of(LAYERS, 4, num_microbatches=4, **options)
    count = int(re.search(r"from (\d+) microbatches", text)[1])

    def smaller(microbatches):
        return [
            LayerCost(
                1,
                parameter_bytes=layer.parameter_bytes,
                activation_bytes=layer.activation_bytes * 4 / microbatches,
            )
            for layer in LAYERS
        ]

    partition(smaller(count), 4, num_microbatches=count, **options)
    with pytest.raises(PartitionError):
        partition(smaller(count - 1), 4, num_microbatches=count - 1, **options)


BLOCKS = [LayerCost(1, backward=2, parameter_bytes=3, activation_bytes=4, boundary_bytes=5)] * 6


@pytest.mark.parametrize(
    ("layers", "stages", "options", "pattern"),
    [
        (
            [*LAYERS, LayerCost(1, parameter_bytes=9 * GIB, name="softmax")],
            17,
            {"num_microbatches": 1, "memory_limit": 16 * GIB},
            r"stage 16 \(layer 16 \('softmax'\)\) needs 27.0 GiB, limit is 16.0 GiB; (?!.*stages)",
        ),
        (
            LAYERS[:8],
            4,
            {"num_virtual_stages": 2, "num_microbatches": 4, "memory_limit": 3 * GIB},
            r"device \d needs",
        ),
        (
            BLOCKS,
            4,
            {"schedule": zb_v(2, 4), "memory_limit": 20},
            r"device \d needs (?!.*(stages,|microbatches)).* from a memory_limit of",
        ),
        (
            [1] * 16,
            4,
            {"max_layers": 5, "same_stage": [[0, 6]]},
            r"same_stage=\[\[0, 6\]\] and max_layers=5; .*from max_layers=7, or without same_stage",
        ),
        ([1] * 16, 4, {"min_layers": 3, "fixed": [2]}, "with min_layers=2, or .*without fixed"),
        ([1] * 16, 4, {"max_layers": 4, "fixed": {1: 6}}, "from max_layers=6, .*without fixed"),
        (
            [1] * 16,
            4,
            {"min_layers": 3, "fixed": {2: 4}, "max_layers": 5, "same_stage": [[8, 13]]},
            "change at least two of these options",
        ),
        (
            [1] * 6,
            3,
            {"same_stage": [[0, 4]]},
            "leaves only 2 pieces of the 6 layers for 3 stages; use at most 2 stages",
        ),
    ],
)
def test_errors_name_the_culprit_and_a_way_out(layers, stages, options, pattern):
    assert re.search(pattern, message_of(layers, stages, **options))
