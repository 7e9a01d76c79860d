"""Python functions of datasets: called in this process, or sent to another one."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.backend import dataset_functions
from pipemesh.backend.dataset_functions import calls_this_process, numpy_call
from pipemesh.errors import DataError


def times(factor, number):
    return [number * factor]


def mapped(function):
    return tf.data.Dataset.range(3).map(lambda n: numpy_call(function, [n], [tf.int64])[0])


def sent(dataset):
    """Returns the pickled function, which is the argument of the call."""
    (function,) = dataset._functions()
    graph = function.function.graph.as_graph_def()
    (text,) = [n.attr["value"].tensor.string_val for n in graph.node if n.op == "Const"]
    return text[0]


@pytest.mark.parametrize("function", [functools.partial(times, 2), lambda n: [n * 2]])
def test_a_dataset_calls_it(function):
    dataset = mapped(function)
    assert [int(n) for n in dataset] == [0, 2, 4]
    assert not calls_this_process(dataset.batch(2).prefetch(1))


def test_another_process_calls_what_was_sent():
    text = sent(mapped(functools.partial(times, 3)))
    dataset_functions._own.pop(text)
    assert dataset_functions._call(text, np.int64(5)) == [15]


def test_another_process_says_what_it_has_not():
    """The function cannot be pickled, or its module is not there."""
    text = sent(mapped(lambda n: [n]))
    dataset_functions._own.pop(text)
    with pytest.raises(DataError, match=r"the worker on .* cannot be sent .*lambda.*in a module"):
        dataset_functions._call(text, np.int64(5))
    text = sent(mapped(functools.partial(times, 4)))
    dataset_functions._own.pop(text)
    elsewhere = text.replace(__name__.encode(), b"x" * len(__name__))
    with pytest.raises(DataError, match=r"has not the code .*No module named 'xxx.*in the folder"):
        dataset_functions._call(elsewhere, np.int64(5))


def test_other_calls_of_python_are_found_wherever_they_are():
    def generated(_):
        return tf.data.Dataset.from_generator(lambda: [1], tf.int64)

    def called(n):
        return tf.numpy_function(lambda x: x, [n], tf.int64, stateful=False)

    numbers = tf.data.Dataset.range(3)
    for dataset in (numbers.flat_map(generated), numbers.map(called).batch(2), generated(0)):
        assert calls_this_process(dataset)
    assert not calls_this_process(numbers.batch(2).map(tf.reduce_sum))
