"""`pipemesh predict`: what a model makes of each held-out example."""

import json

import numpy as np
import pytest

from models.digits.data import load_digits
from tests.commands.program import done, refused

MODEL = "models.digits.params.DigitsPipelined"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted") / "run"
    done("train", f"--model={MODEL}", "--steps=60", f"--logdir={folder}")
    return folder


@pytest.mark.slow
def test_each_held_out_example_has_a_line_under_any_plan(logdir):
    def predictions(*flags):
        lines = done("predict", f"--logdir={logdir}", "--dataset=Test", *flags).splitlines()
        values = list(map(json.loads, lines))
        assert [each["number"] for each in values] == list(range(len(values)))
        return np.array([each["predictions"] for each in values])

    found = predictions()
    np.testing.assert_allclose(predictions("--plain"), found, rtol=1e-4, atol=1e-4)
    told = done("evaluate", f"--logdir={logdir}", "--dataset=Test").splitlines()[-1]
    labels = load_digits()[1].labels
    assert len(found) == len(labels)
    accuracy = np.mean(found.argmax(-1) == labels)
    assert f"accuracy {accuracy:.3f}" in told


@pytest.mark.slow
def test_what_cannot_be_predicted_is_one_line(tmp_path, logdir):
    assert "cannot tell which model to use" in refused("predict")
    assert "has no checkpoint" in refused("predict", f"--logdir={tmp_path}", f"--model={MODEL}")
    assert "the checkpoint is of models.digits.params.DigitsPipelined, which says nothing of" in (
        refused("score", f"--logdir={logdir}", "--prompt=a")
    )
