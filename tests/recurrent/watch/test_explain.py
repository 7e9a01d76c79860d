"""An operation that fails in a stage ends the step promptly and is named in one line."""

import subprocess

import pytest
import tensorflow as tf

from pipemesh.errors import PipelineError
from pipemesh.recurrent import explain
from tests.warm import warm

PYTHON = "ValueError: the cable is loose"
RANGE = "indices[0] = 7 is not in [0, 2)"
PLACE = "stage 'stage 2' (CPU:2), layer 'block#3'"


# The names of functions inlined into a TF1 session have no microbatch.
@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        (
            "tf2",
            [
                f"{PLACE}, microbatch 5, forward: {PYTHON}",
                f"{PLACE}, microbatch 3, backward: {PYTHON}",
                f"{PLACE}, microbatch 6, forward: {RANGE}",
            ],
        ),
        (
            "tf1",
            [
                f"{PLACE}, forward: {PYTHON}",
                f"{PLACE}, backward: {PYTHON}",
                f"{PLACE}, forward: {RANGE}",
            ],
        ),
    ],
)
def test_an_exception_surfaces_promptly_and_changes_nothing(mode, expected):
    result = subprocess.run(
        warm("-m", "tests.recurrent.failing", mode),
        capture_output=True,
        text=True,
        timeout=120,
    )
    lines = [line for text in expected for line in (text, "prompt", "unchanged")]
    assert result.stdout.splitlines() == [*lines, "goes on"], result.stderr[-3000:]


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
