"""Infeasible problems: the tightest constraint is named, and every promised setting works."""

import re

import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.schedule import simulate, zb_v

GIB = 2**30
LAYERS = [
    LayerCost(1, parameter_bytes=GIB / 2, activation_bytes=GIB / 4, name=f"block{index}")
    for index in range(16)
]


def message_of(*args, **options):
    with pytest.raises(PartitionError) as caught:
        partition(*args, **options)
    return str(caught.value)


def test_memory_names_the_stage_what_it_needs_and_the_nearest_settings():
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


def test_one_layer_that_is_too_large_is_named():
    layers = [*LAYERS, LayerCost(1, parameter_bytes=9 * GIB, name="softmax")]
    text = message_of(layers, 17, num_microbatches=1, memory_limit=16 * GIB)
    assert "stage 16 (layer 16 ('softmax')) needs 27.0 GiB, limit is 16.0 GiB" in text
    assert "stages" not in text.split(";")[1]


def test_devices_are_named_with_virtual_stages():
    text = message_of(LAYERS[:8], 4, num_virtual_stages=2, num_microbatches=4, memory_limit=3 * GIB)
    assert re.search(r"device \d needs", text)


@pytest.mark.parametrize(
    ("options", "hints"),
    [
        (
            {"max_layers": 5, "same_stage": [[0, 6]]},
            ["same_stage=[[0, 6]] and max_layers=5", "from max_layers=7", "without same_stage"],
        ),
        ({"min_layers": 3, "fixed": [2]}, ["with min_layers=2", "without fixed"]),
        ({"max_layers": 4, "fixed": {1: 6}}, ["from max_layers=6", "without fixed"]),
    ],
)
def test_options_that_contradict_each_other(options, hints):
    text = message_of([1] * 16, 4, **options)
    for hint in hints:
        assert hint in text


def test_several_culprits_at_once():
    options = {"min_layers": 3, "fixed": {2: 4}, "max_layers": 5, "same_stage": [[8, 13]]}
    assert "at least two of these options have to give way" in message_of([1] * 16, 4, **options)


def test_groups_that_leave_too_few_pieces():
    text = message_of([1] * 6, 3, same_stage=[[0, 4]])
    assert "leaves only 2 pieces of the 6 layers for 3 stages; use at most 2 stages" in text


def test_what_is_too_large_for_a_table_names_the_device_and_a_limit_that_works():
    facts = simulate(zb_v(2, 4)).for_partition()
    with pytest.raises(
        PartitionError, match=r"device \d needs .* from a memory_limit of"
    ) as caught:
        partition(
            [LayerCost(1, backward=2, parameter_bytes=3, activation_bytes=4, boundary_bytes=5)] * 6,
            4,
            memory_limit=20,
            **facts,
        )
    assert "stages," not in str(caught.value) and "microbatches" not in str(caught.value)
