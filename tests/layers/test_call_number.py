"""How often a layer was called in a step."""

import pytest
import tensorflow as tf
from lingvo.core import base_layer

from pipemesh.errors import PipelineError
from pipemesh.layers.call_number import number_of_call, recorded_calls

STEP = tf.constant(3, tf.int64)


@pytest.fixture
def layer():
    return base_layer.BaseLayer.Params().Set(name="layer").Instantiate()


@pytest.fixture
def other():
    return base_layer.BaseLayer.Params().Set(name="other").Instantiate()


def test_eager_calls_of_one_step_are_counted_for_each_layer(layer, other):
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
    def branch():
        seen.append(number_of_call(layer, STEP))
        return 0

    for _ in range(2):
        seen = []
        with tf.Graph().as_default():
            branch()
            tf.cond(tf.constant(True), branch, branch)
            tf.function(branch)()
            branch()
        assert seen == [0, 1, 2, 3, 4]


def test_each_traced_function_is_a_step_of_its_own(layer):
    seen = []

    def run():
        seen.append(number_of_call(layer, STEP))
        tf.cond(tf.constant(True), lambda: seen.append(number_of_call(layer, STEP)), lambda: None)

    for _ in range(2):
        tf.function(run).get_concrete_function()
    assert seen == [0, 1, 0, 1]


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
    assert number_of_call(layer, STEP) == 4


def test_records_nest_and_end_with_an_error(layer):
    outer, inner = [7], [8]
    with recorded_calls(outer):
        with pytest.raises(ValueError, match="mine"), recorded_calls(inner):
            assert number_of_call(layer, STEP) == 8
            raise ValueError("mine")
        assert number_of_call(layer, STEP) == 7
    assert number_of_call(layer, STEP) == 0


def test_recompute_grad_may_not_call_a_layer_again(layer):
    def run(x):
        number_of_call(layer, STEP)
        return 2 * x

    x = tf.constant(1.0)
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = tf.recompute_grad(run)(x)
    with (
        tf.GradientTape(),
        pytest.raises(PipelineError, match=r"calls 'layer' again .*RematerializeFn"),
    ):
        number_of_call(layer, STEP)
        tape.gradient(y, x)
