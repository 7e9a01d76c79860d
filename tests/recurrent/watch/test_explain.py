"""An operation that fails in a stage ends the step promptly and is named in one line."""

import time

import numpy as np
import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent.watch.explain import explain
from tests.recurrent.poisoned import MODES, broken, nothing, poison


@pytest.mark.parametrize("mode", MODES)
def test_an_exception_surfaces_promptly_and_changes_nothing(mode):
    training = MODES[mode](spoil=broken, check_numerics=None)
    for layer, direction, text in [
        (3, "forward", "ValueError: the cable is loose"),
        (3, "backward", "ValueError: the cable is loose"),
        (2, "forward", "indices[0] = 7 is not in [0, 2)"),
    ]:
        assert np.isfinite(training.step(nothing())), "training can go on"
        before, begin = training.values(), time.perf_counter()
        with pytest.raises(tf.errors.OpError) as caught:
            training.step(poison(layer, 2, direction))
        assert time.perf_counter() - begin < 10
        where = f"stage 'stage1' (CPU:1), layer 'layer{layer}', microbatch 2, {direction}"
        assert str(explain(caught.value, {"stage1": "CPU:1"})) == f"{where}: {text}"
        for old, new in zip(before, training.values(), strict=True):
            np.testing.assert_array_equal(old, new)


def error(message):
    return tf.errors.InvalidArgumentError(None, None, message)


NODE = "tower/action_3B12/PartitionedCall/stage.s/gradients/stage.s/layer.a-2f-b/MatMul_grad/Mul"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (
            f"Graph execution error:\n\nDetected at node {NODE} defined at (most recent call "
            f'last):\n  File "x.py", line 1, in <module>\n\nbad\n\t [[{{{{node {NODE}}}}}]]',
            "stage 's', layer 'a/b', microbatch 12, backward: bad",
        ),
        ("bad\n\t [[{{node stage.s/Mul}}]]", "stage 's', forward: bad"),
        ("bad\n\t [[{{node stage.s/gradients/Mul}}]]", "stage 's', backward: bad"),
        (
            "2 root error(s) found.\n  (0) INTERNAL:  bad\n\t [[Recv]]\n\t [[{{node stage.s/x}}]]",
            "stage 's', forward: bad",
        ),
        (
            r"assertion failed: [stage \'\303\244\', x: y is not finite (NaN or infinite)]",
            "stage 'ä', x: y is not finite (NaN or infinite)",
        ),
    ],
)
def test_all_forms_of_messages_become_one_line(message, expected):
    explained = explain(error(message))
    assert isinstance(explained, PipelineError)
    assert str(explained) == expected


def test_errors_from_elsewhere_are_left_alone():
    assert explain(error("bad\n\t [[{{node dense/MatMul}}]]")) is None
    assert explain(error("assertion failed: [gradient is not finite]")) is None
