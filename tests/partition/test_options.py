"""The options of a partition, alone and together, and what their errors say."""

import itertools
import re

import numpy as np
import pytest

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, partition
from pipemesh.partition.costs import as_stack
from pipemesh.partition.options import check_options
from pipemesh.schedule import zb_v
from tests.partition.problems import DEFAULTS


@pytest.mark.parametrize(
    ("num_layers", "num_stages", "options", "message"),
    [
        (2, 3, {}, "2 layers allow 1 to 2"),
        (2, 0, {}, "num_stages is 0"),
        (2, 1.0, {}, "must be a whole number"),
        (2, True, {}, "must be a whole number"),
        (2, np.True_, {}, "but must be a whole number, 1 or more"),
        (6, 2, {"speeds": [1, float("inf")]}, r"speeds\[1\] is inf, but must be a finite number"),
        (6, 2, {"speeds": ["1", 1]}, r"speeds\[0\] is '1', but must be a finite number above"),
        (
            *(6, 2, {"optimizer_bytes_per_parameter_byte": -1}),
            "is -1, but must be a finite number zero or more",
        ),
        (6, 2, {"remat": 3}, "remat is 3, but must be one of none, full"),
        (6, 3, {"num_virtual_stages": 2}, "use 2 or 4 stages"),
        (6, 2, {"method": "exakt"}, "method is 'exakt', but must be .* did you mean 'exact'"),
        (6, 2, {"schedule": "1f2b"}, "did you mean '1f1b'"),
        (6, 2, {"num_microbatches": 0}, "num_microbatches is 0, but must be 1 or more"),
        (
            *(4, 4, {"num_virtual_stages": 2, "schedule": "one_f_one_b"}),
            "one stage on each device",
        ),
        (6, 2, {"speeds": [1]}, "1 numbers for 2 devices"),
        (6, 2, {"speeds": [1, 0]}, r"speeds\[1\] is 0, but must be a finite number above"),
        (6, 2, {"bandwidth": 1}, "bandwidth needs costs with boundary_bytes, but"),
        (6, 2, {"memory_limit": 1}, "memory_limit needs costs with parameter_bytes and"),
        (6, 2, {"remat": "full"}, "needs costs with forward, but they are plain"),
        (6, 2, {"remat": "ful"}, "did you mean 'full'"),
        (6, 2, {"overlap_transfers": True}, "without bandwidth there are no transfers"),
        (6, 2, {"min_layers": 4}, "use min_layers=3 or 1 stages"),
        (6, 2, {"max_layers": 2}, "use max_layers=3 or 3 stages"),
        (6, 2, {"max_layers": 3, "min_layers": 4}, "use min_layers=3"),
        (6, 1, {"max_layers": 2, "min_layers": 3}, "max_layers is 2, but min_layers is 3"),
        (6, 2, {"same_stage": [0, 1]}, r"same_stage\[0\] is 0, but must be a group"),
        (6, 2, {"same_stage": 5}, "same_stage is 5, but must be a sequence of groups"),
        (6, 2, {"fixed": 5}, "fixed is 5, but must be layers such as"),
        (6, 2, {"fixed": "12"}, "fixed is '12', but must be layers such as"),
        (6, 2, {"fixed": {1: 2, "a": 3}}, "a stage in fixed is 'a', but must be a whole number"),
        (6, 2, {"speeds": {0: 1, 1: 2}}, "speeds is {0: 1, 1: 2}, but must be a sequence"),
        (6, 2, {"speeds": 5}, "speeds is 5, but must be a sequence"),
        (6, 2, {"overlap_transfers": "no"}, "overlap_transfers is 'no', but must be True or"),
        (6, 2, {"stage_devices": {0: 0, 1: 1}}, "stage_devices is .* but must be a sequence"),
        (6, 2, {"same_stage": [[0, 6]]}, "layer indices from 0 to 5"),
        (6, 2, {"same_stage": [[0]]}, "two or more layer indices"),
        (6, 2, {"fixed": [0]}, "must be 1 or more"),
        (6, 2, {"fixed": [6]}, "must be a layer from 1 to 5"),
        (6, 2, {"fixed": [1, 2]}, "use 3 stages"),
        (6, 2, {"fixed": {2: 3}}, "its stages must be from 1 to 1"),
        (6, 3, {"fixed": {1: 3, 2: 3}}, "leaves 0 layers for the 1 stages between"),
        (6, 4, {"fixed": {1: 5}}, "leaves 1 layers for the last 3 stages"),
        (6, 2, {"fixed": [3], "same_stage": [[2, 3]]}, "keeps the layers 2 to 3 together"),
    ],
)
def test_invalid_options_name_the_allowed_values(num_layers, num_stages, options, message):
    with pytest.raises(PartitionError, match=message):
        partition([1.0] * num_layers, num_stages, **options)


def test_suggested_numbers_of_layers_are_allowed():
    for layers, stages, least, most in itertools.product(
        range(1, 8), range(1, 8), range(1, 5), (None, *range(1, 8))
    ):
        if stages > layers:
            continue
        stack, asked = as_stack([1.0] * layers), {"min_layers": least, "max_layers": most}
        fits = least * stages <= layers and (most is None or most * stages >= layers)
        fits &= most is None or least <= most
        try:
            check_options(stack, stages, DEFAULTS | asked)
        except PartitionError as error:
            assert not fits
            found = re.search(r"use (\w+)=(\d+) or (\d+) stages", str(error))
            if found is None:
                assert "swap them?" in str(error) and most < least
                continue
            name, value, others = found[1], int(found[2]), int(found[3])
            # Each of the two by itself, as far as the other bound lets it.
            check_options(stack, stages, DEFAULTS | {name: value})
            if others:
                check_options(stack, others, DEFAULTS | {name: asked[name]})
        else:
            assert fits


LAYERS = [LayerCost(1, backward=2, parameter_bytes=3, activation_bytes=4, boundary_bytes=5)] * 6
V = {"in_flight": (4, 3, 2, 1), "stage_devices": (0, 1, 1, 0)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_limit": 1}, "memory_limit needs num_microbatches: the activations that a stage"),
        ({"stage_devices": (0, 1, 1, 0), "memory_limit": 9}, "memory_limit needs in_flight beside"),
        ({**V, "remat": "except_last"}, "remat='except_last' needs at_once beside in_flight"),
        ({**V, "speeds": [1, 1, 1, 1]}, "speeds has 4 numbers for 2 devices"),
        ({**V, "schedule": "gpipe"}, "schedule and in_flight are given, but both say"),
        ({"schedule": "zb_v"}, "schedule 'zb_v' is simulated .*; give num_microbatches"),
        ({"schedule": zb_v(3, 6)}, "schedule has 6 stages, but num_stages is 4; make them equal"),
        ({"schedule": zb_v(2, 4), "num_microbatches": 8}, "has 4 microbatches, but num_microbatch"),
        ({"schedule": "interleaved:3"}, "use 3 or 6 stages"),
        ({"schedule": "v_half:2"}, "v_half always has 2 stages a device"),
        ({"in_flight": (1, 2)}, "in_flight has 2 numbers for 4 stages; give one a stage"),
        ({"in_flight": 3}, "in_flight is 3, but must be a sequence"),
        ({"in_flight": (1, 2, 3, 0.5)}, r"in_flight\[3\] is 0\.5, but must be a whole number"),
        ({**V, "num_microbatches": 3}, r"in_flight\[0\] is 4, but num_microbatches is 3"),
        ({"stage_devices": (0, 1)}, "stage_devices has 2 numbers for 4 stages"),
        ({"stage_devices": (0, 2, 2, 0)}, "no stage is on device 1; number the devices"),
        ({**V, "num_virtual_stages": 4}, "num_virtual_stages is 4, but stage_devices has 2"),
        ({"at_once": (0, 0, 0, 2)}, "at_once counts microbatches; give num_microbatches too"),
        (
            {"at_once": (0, 0, 0, 2), "num_microbatches": 1},
            r"at_once\[3\] is 2, but num_microbatch",
        ),
    ],
)
def test_numbers_of_a_table_are_checked(options, message):
    with pytest.raises(PartitionError, match=message):
        partition(LAYERS, 4, **options)


@pytest.mark.parametrize(
    ("homes", "placement", "rounds"),
    [
        ((0, 1, 0, 1), (), 2),  # They go round, as without a word.
        ((0, 1, 1, 0), (0, 1, 1, 0), 2),
        ((1, 0, 2, 3), (1, 0, 2, 3), 1),
        ((0, 0, 0, 0), (), 4),
        ((0, 0, 1, 0), (0, 0, 1, 0), 3),
        (np.asarray([0, 1, 2, 3]), (), 1),
    ],
)
def test_a_placement_says_how_many_stages_a_device_has_at_most(homes, placement, rounds):
    plan = partition([1.0] * 4, 4, stage_devices=homes)
    assert (plan.placement, plan.num_virtual_stages) == (placement, rounds)
    assert plan.stage_devices == tuple(homes)


def test_a_boundary_that_is_fixed_twice_counts_once():
    assert partition([1.0] * 9, 3, fixed=[8, 1, 8]).boundaries == (0, 1, 8, 9)
