"""Microbatches in flight and bytes of stages, against definitions, tables and fractions."""

import dataclasses
import itertools
import json
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, in_flight, partition
from pipemesh.partition.costs import as_stack
from pipemesh.partition.memory import WITH_FORMULA, at_once, memory_model
from pipemesh.plan import Figures, Plan, predict
from pipemesh.schedule import build, simulate
from pipemesh.schedule.names import NAMES
from tests.partition.brute_force import bytes_of


def layers_of(seed, digits):
    """Layers with numbers of so many decimals, or with longer ones than a decimal is read with."""
    random = np.random.default_rng(seed)
    layers = []
    for _ in range(random.integers(1, 9)):
        numbers = random.random(4) * 9
        numbers = numbers / 700 if digits is None else numbers.round(digits)
        parameters, kept, output, shared = numbers.tolist()
        layers.append(
            LayerCost(
                1,
                backward=1,
                parameter_bytes=parameters,
                activation_bytes=max(kept, shared),
                boundary_bytes=output,
                shared_bytes=shared,
            )
        )
    return layers


@settings(max_examples=60)
@given(
    st.integers(0, 2**40),
    st.sampled_from([0, 3, None]),
    st.tuples(st.integers(0, 4), st.integers(0, 4)),
    st.sampled_from(["none", "full", "except_last"]),
    st.sampled_from([0, 0.1, 2]),
    st.booleans(),
)
def test_stage_memory_is_the_sum_of_its_tensors(
    seed, digits, held_by_stage, remat, optimizer, exact
):
    layers = layers_of(seed, digits)
    model = memory_model(
        as_stack(layers),
        np.arange(len(layers) + 1),
        limit=20.5,
        optimizer_bytes_per_parameter_byte=optimizer,
        microbatches_in_flight=held_by_stage,
        remat=remat,
        exact=exact,
    )
    assert model.limit * model.unit <= Fraction(41, 2) < (model.limit + 1) * model.unit
    for stage, held in enumerate(held_by_stage):
        for begin, end in itertools.combinations(range(len(layers) + 1), 2):
            found = int(model.units(stage, begin, end)) * model.unit
            expected = bytes_of(layers, begin, end, held, remat, optimizer)
            # Rounded up, by at most a unit for each number.
            most = 0 if exact or digits is not None else (end - begin + 1) * (2 + 3 * held)
            assert expected <= found <= expected + most * model.unit


def test_invalid_schedules_are_refused():
    with pytest.raises(PartitionError, match="runs one stage on each device"):
        in_flight("zb_h1", 4, 4, 2)
    with pytest.raises(PartitionError, match="schedule is 'pipe', but must be one of gpipe"):
        in_flight("pipe", 4, 4)


@pytest.mark.parametrize("name", WITH_FORMULA)
@pytest.mark.parametrize("devices", [1, 2, 3, 5])
def test_formulas_equal_the_tables(name, devices):
    for rounds in (1, 2, 3) if NAMES[name].is_open else (1,):
        for microbatches in range(1, 13):
            if rounds > 1 and name == "interleaved_one_f_one_b" and microbatches % devices:
                continue
            table = build(name, devices, microbatches, rounds if NAMES[name].is_open else None)
            facts = simulate(table).for_partition()
            arguments = (name, microbatches, devices * rounds, rounds)
            assert in_flight(*arguments) == facts["in_flight"]
            turning = [share * microbatches for share in at_once(*arguments)]
            assert turning == list(facts["at_once"])


def test_an_unknown_number_of_microbatches_is_a_large_one():
    for name in WITH_FORMULA:
        many = at_once(name, 10**9, 4)
        assert at_once(name, None, 4) == tuple(Fraction(round(share)) for share in many)


@settings(max_examples=60)
@given(st.integers(0, 2**40), st.sampled_from(["gpipe", "1f1b"]), st.sampled_from(["none", "full"]))
def test_the_forecast_of_a_plan_is_just_below_this_rule(seed, schedule, remat):
    """The rule adds peaks that the forecast, action by action, need not find at the same time.

    They differ by the gradients of a stage at most and, with remat, by one input of the stage.
    """
    random = np.random.default_rng(seed)
    num_stages, num_microbatches = (int(number) for number in random.integers(1, 5, 2))
    layers = [
        LayerCost(
            1,
            parameter_bytes=int(random.integers(9)),
            activation_bytes=int(random.integers(5, 20)),
            boundary_bytes=int(random.integers(1, 6)),
        )
        for _ in range(random.integers(num_stages, 9))
    ]
    options = {"schedule": schedule, "num_microbatches": num_microbatches, "remat": remat}
    # Gradients, and two numbers of the optimizer beside each weight.
    cut = partition(layers, num_stages, optimizer_bytes_per_parameter_byte=3, **options)
    costs = json.dumps([dataclasses.asdict(layer) for layer in layers])
    figures = dataclasses.replace(Figures.from_json(costs, "costs"), optimizer=2.0)
    plan = Plan(f"layers:{num_stages}", boundaries=cut.boundaries, **options)
    forecast = predict(plan, figures, num_microbatches).memory
    for stage, inside in enumerate(cut.stages):
        gradients = sum(layers[layer].parameter_bytes for layer in inside)
        entry = layers[inside[0] - 1].boundary_bytes if stage and remat == "full" else 0
        assert 0 <= cut.stage_memory[stage] - forecast[stage] <= gradients + entry
