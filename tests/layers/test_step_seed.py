"""Steps, calls and seeds of random operations."""

import types

import numpy as np
import pytest
import tensorflow as tf
from lingvo.core import base_layer, py_utils
from lingvo.core import layers as lingvo_layers

from pipemesh import randomness
from pipemesh.layers import CellFnFPropOpReplacementWrapper, step_seed
from pipemesh.layers.step_seed import number_of_call, recorded_calls
from tests.layers.harness import evaluated

STEP = tf.constant(3, tf.int64)


@pytest.fixture
def layer():
    return base_layer.BaseLayer.Params().Set(name="layer").Instantiate()


def test_eager_calls_of_one_step_are_counted_for_each_layer(layer):
    other = base_layer.BaseLayer.Params().Set(name="other").Instantiate()
    assert [number_of_call(layer, STEP) for _ in range(3)] == [0, 1, 2]
    assert number_of_call(other, STEP) == 0
    assert [number_of_call(layer, STEP + 1) for _ in range(2)] == [0, 1]
    assert number_of_call(layer, STEP) == 0, "the step is repeated"


def test_calls_under_one_tape_are_counted_whatever_the_step(layer):
    for _ in range(2):
        with tf.GradientTape():
            assert [number_of_call(layer, STEP + i) for i in range(3)] == [0, 1, 2]
            with tf.GradientTape():
                assert number_of_call(layer, STEP) == 3, "the outermost tape counts"


def test_calls_in_one_graph_are_counted_and_functions_inside_belong_to_it(layer):
    seen = []

    def branch():
        seen.append(number_of_call(layer, STEP))
        return 0

    def run():
        branch()
        tf.cond(tf.constant(True), branch, branch)

    for _ in range(2):
        with tf.Graph().as_default():
            run()
            tf.function(branch)()
            branch()
        # A function that is traced outside of graphs is a step of its own.
        tf.function(run).get_concrete_function()
    assert seen == [0, 1, 2, 3, 4, 0, 1, 2] * 2


def test_what_is_computed_again_has_the_numbers_of_the_first_time(layer):
    numbers = []
    number_of_call(layer, STEP)
    with recorded_calls(numbers):
        assert [number_of_call(layer, STEP) for _ in range(2)] == [1, 2]
    assert numbers == [1, 2]
    with recorded_calls(numbers):
        assert [number_of_call(layer, STEP) for _ in range(2)] == [1, 2]
        assert number_of_call(layer, STEP) == 3, "a further one is counted and appended"
    assert numbers == [1, 2, 3]
    # Records nest, and end with an error.
    outer, inner = [7], [8]
    with recorded_calls(outer):
        with pytest.raises(ValueError, match="mine"), recorded_calls(inner):
            assert number_of_call(layer, STEP) == 8
            raise ValueError("mine")
        assert number_of_call(layer, STEP) == 7
    assert number_of_call(layer, STEP) == 4


def params(random_seed=None, is_inference=False):
    return types.SimpleNamespace(random_seed=random_seed, is_inference=is_inference)


def inside(step=3, **kwargs):
    with randomness.plan_free_randomness(tf.constant(step, tf.int64)):
        return step_seed.GenerateStepSeedPair(params(), **kwargs).numpy().tolist()


@pytest.fixture
def stepless():
    """A graph without a global step."""
    with tf.Graph().as_default() as graph:
        yield graph


def test_a_step_that_was_set_takes_the_place_of_lingvos(stepless):
    assert step_seed.GetOverWriteGlobalStep() is None and step_seed.current_step() is None
    lingvos = py_utils.GetOrCreateGlobalStepVar()
    assert step_seed.GetOverWriteGlobalStep() is lingvos
    for value in (tf.constant(5), tf.constant(6)):
        step_seed.SetOverWriteGlobalStep(value)
        assert step_seed.GetOverWriteGlobalStep() is value
    with tf.Graph().as_default():
        assert step_seed.GetOverWriteGlobalStep(stepless) is value
        assert step_seed.GetOverWriteGlobalStep() is None
    assert step_seed.current_step().dtype == tf.int64
    assert evaluated(step_seed.current_step()) == 6


def test_seeds_depend_on_step_layer_draw_and_what_is_given():
    first = inside()
    assert first == inside() and first[0] == 3
    assert inside(step=4)[0] == 4
    assert inside(op_seed=2) == [n + 2 for n in first]
    with randomness.plan_free_randomness(STEP):
        pairs = [step_seed.GenerateStepSeedPair(params()) for _ in range(2)]
        assert pairs[0][1] != pairs[1][1] and pairs[0].dtype == tf.int64
    with randomness.plan_free_randomness(STEP):
        seeded = step_seed.GenerateStepSeedPair(params(random_seed=10))
    assert seeded.numpy().tolist() == [n + 10 for n in first]


def test_outside_of_randomness_seeds_are_step_and_scope(stepless):
    step_seed.SetOverWriteGlobalStep(tf.constant(5))
    with tf.name_scope("a"):
        first = step_seed.GenerateStepSeedPair(params(), op_seed=1)
    with tf.name_scope("b"):
        second = step_seed.GenerateStepSeedPair(params())
    first, second = evaluated([first, second])
    assert first[0] == 6 and second[0] == 5 and first[1] - 1 != second[1]


def test_in_inference_seeds_differ_from_call_to_call_unless_one_is_given():
    def draw(**kwargs):
        with randomness.plan_free_randomness(STEP):
            seeds = step_seed.GenerateStepSeedPair(params(is_inference=True, **kwargs))
        return seeds.numpy().tolist()

    assert draw() != draw()
    assert draw(random_seed=1) == draw(random_seed=1)


def test_calls_of_one_step_have_keys_of_their_own_that_hold_the_step(stepless, layer):
    assert step_seed.step_of_call(layer) is None and step_seed.global_step_in(None) is None
    step_seed.SetOverWriteGlobalStep(tf.constant(5))
    keys = [step_seed.step_of_call(layer) for _ in range(3)]
    with randomness.plan_free_randomness(STEP):
        keys.append(step_seed.step_of_call(layer))
    values = evaluated([*keys, *map(step_seed.global_step_in, keys)])
    assert len(set(values[:3])) == 3 and values[0] == values[3] == 5
    assert values[4:] == [5] * 4


def test_lingvos_layers_take_seeds_and_steps_from_here_inside_only(stepless):
    outer, original = tf.constant(1), py_utils.GenerateStepSeedPair
    step_seed.SetOverWriteGlobalStep(outer)
    with pytest.raises(ValueError, match="mine"), step_seed.keyed_seeds(STEP):
        assert py_utils.GenerateStepSeedPair is step_seed.GenerateStepSeedPair
        assert step_seed.GetOverWriteGlobalStep() is STEP
        assert py_utils.GetGlobalStep() is STEP
        raise ValueError("mine")
    assert py_utils.GenerateStepSeedPair is original
    assert step_seed.GetOverWriteGlobalStep() is outer
    with step_seed.keyed_seeds():
        assert step_seed.GetOverWriteGlobalStep() is outer


def test_the_wrapper_of_lingvos_cells_serves_other_loops():
    """As lingvo's pipeline calls a cell, in a loop without a global step."""
    p = lingvo_layers.DeterministicDropoutLayer.Params()
    layer = p.Set(name="dropout", keep_prob=0.5).Instantiate()

    def dropped(step):
        with CellFnFPropOpReplacementWrapper():
            step_seed.SetOverWriteGlobalStep(step)
            return layer.FProp(layer.theta, tf.ones([64]))

    @tf.function(autograph=False)
    def loop():
        return tf.map_fn(dropped, tf.constant([3, 4, 3]), fn_output_signature=tf.float32)

    first, other, again = loop().numpy()
    np.testing.assert_array_equal(first, again)
    assert (first != other).any() and set(first) == {0.0, 2.0}
    original = py_utils.GenerateStepSeedPair
    with pytest.raises(ValueError, match="mine"), CellFnFPropOpReplacementWrapper():
        raise ValueError("mine")
    assert py_utils.GenerateStepSeedPair is original


def test_without_a_pipeline_draws_are_those_of_the_whole_batch():
    with step_seed.whole_batch_randomness(STEP):
        assert randomness.is_active()
        drawn = tf.random.uniform([4])
        with step_seed.whole_batch_randomness(STEP + 1):
            second = tf.random.uniform([4])
    assert not randomness.is_active()
    with randomness.plan_free_randomness(STEP):
        np.testing.assert_array_equal(tf.random.uniform([4]), drawn)
        np.testing.assert_array_equal(tf.random.uniform([4]), second)
