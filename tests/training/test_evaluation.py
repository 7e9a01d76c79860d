"""What is told of each example, of whatever a task predicts."""

import contextlib
import types

import keras
import tensorflow as tf
from lingvo.core import py_utils

from pipemesh.layers import KerasTask
from pipemesh.training.evaluation import Predictor


def test_each_of_several_outputs_has_its_own_rows():
    """Where there were as many rows as outputs, they were exchanged."""
    py_utils.SetEagerMode(True, test_mode=True)
    inputs = keras.Input([3])
    widths = {"list": (1, 1), "tuple": (1, 1), "uneven": (2, 1)}
    batch = {"inputs": tf.reshape(tf.range(6.0), [2, 3])}
    for kind, (first, second) in widths.items():
        outputs = [keras.layers.Dense(first)(inputs), keras.layers.Dense(second)(inputs)]
        model = keras.Model(inputs, tuple(outputs) if kind == "tuple" else outputs)
        task = KerasTask.Params().Set(name="two", model=model, loss="mse").Instantiate()

        def predict(batch, task=task):
            return task.ComputePredictions(task.theta, py_utils.NestedMap(batch))

        predictor = Predictor.__new__(Predictor)
        vars(predictor).update(
            _trained=types.SimpleNamespace(cluster=lambda **_: contextlib.nullcontext()),
            _predict=tf.function(predict, autograph=False),
            left_out=set(),
        )
        found = list(predictor._of(batch))
        right = predict(batch).outputs
        assert predictor.left_out == {"penalty"}
        for row, example in enumerate(found):
            assert sorted(example) == ["outputs[0]", "outputs[1]"]
            for number in range(2):
                wanted = right[number][row].numpy()
                assert example[f"outputs[{number}]"].tolist() == wanted.tolist()
    py_utils.SetEagerMode(False, test_mode=True)
