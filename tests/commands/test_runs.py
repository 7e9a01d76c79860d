"""`pipemesh train`, `evaluate` and `predict`, from the command line to the last line."""

import json

import numpy as np
import pytest

from models.digits.data import load_digits
from pipemesh.commands.runs import without_effect
from pipemesh.training import Options
from tests.commands.program import done, refused, without_tensorflow

MODEL = "--model=models.digits.params.DigitsPlain"


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "params.DigitsPipelined",
        pytest.param("params.DigitsPlain", marks=pytest.mark.exhaustive),
        pytest.param("keras_model.DigitsKeras", marks=pytest.mark.exhaustive),
    ],
)
def test_models_that_are_no_language_models_train_go_on_and_are_judged(tmp_path, model):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    flags = [f"--model=models.digits.{model}", "--save_every=3"]
    expected = done("train", *flags, "--steps=6", f"--logdir={whole}")
    done("train", *flags, "--steps=3", f"--logdir={parts}")
    # The model is known by then.
    out = done("train", "--steps=6", f"--logdir={parts}")
    assert f"resuming with saved flags: --model=models.digits.{model} --save_every=3" in out
    assert f"going on from {parts}/ckpt-3" in out
    (line,) = [line for line in expected.splitlines() if line.startswith("held out at step 6: ")]
    assert line in out and "accuracy 0." in line
    judged = done("evaluate", f"--logdir={parts}")
    score = line.removeprefix("held out at step 6: ").partition(" (")[0]
    assert judged.splitlines()[-1] == f"{parts}/ckpt-6, step 6: {score}"


@pytest.mark.slow
def test_another_plan_is_told_and_judges_alike(tmp_path):
    model = "--model=tests.training.small_models.PlannedPoints"
    out = done("train", model, "--steps=2", f"--logdir={tmp_path}", "--early_stop=1")
    line = next(line for line in out.splitlines() if line.startswith("held out at step 2: "))
    score = line.removeprefix("held out at step 2: ").partition(" (")[0]
    split = ["--mesh_shape=layers:2;data:2", "--layout=batch:data"]
    for flags in (["--plain"], split):
        assert done("evaluate", f"--logdir={tmp_path}", *flags).endswith(f"step 2: {score}\n")
    out = done("train", "--steps=3", f"--logdir={tmp_path}", *split)
    assert "changed since the checkpoint: mesh layers:2 -> layers:2;data:2" in out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "told"),
    [
        ([MODEL, "--mesh_shape=layers:2"], "has no PipeliningLayer"),
        ([MODEL, "--trace_schedule"], "no pipeline of single actions to time"),
    ],
)
def test_what_a_model_lacks_is_one_line(words, told, tmp_path):
    assert told in refused("train", *words, f"--logdir={tmp_path}")


NAMES = "gpipe, 1f1b (or one_f_one_b), interleaved:V"
REFUSED = [
    (["train"], "cannot tell which model to use; pass --model=package.module.Class"),
    (["train", MODEL, "--step=3"], "unknown flag --step; did you mean --steps?"),
    (["train", MODEL, "--mesh_shape=2"], "--mesh_shape='2': '2' in mesh shape '2' is not"),
    (["train", MODEL, "--plain", "--num_microbatches=2"], "--num_microbatches"),
    (["train", MODEL, "--num_microbatches=0"], "--num_microbatches=0: it must be above 0"),
    (["train", MODEL, "--remat=some"], "error: --remat='some': 'some' is no policy; "),
    # It was found in the first step, or offered names of the same kind.
    (["train", MODEL, "--schedule=forward_only"], f"it trains nothing; give one of {NAMES}"),
    (["train", MODEL, "--schedule=decode:4"], f"it trains nothing; give one of {NAMES}"),
    (["train", MODEL, "--schedule=1f1bb"], f"did you mean '1f1b'? there are {NAMES}"),
    (["evaluate"], "cannot tell which model to use"),
    (["evaluate", "--logdir=/no/such/run", "--eval-batches=2"], "--eval_batches is for training"),
    (["evaluate", "--logdir=/no/such/run", "--elastic"], "--elastic is for training"),
    (["evaluate", "--logdir=/no/such/run"], "has no checkpoint; train first"),
]


def test_what_cannot_be_had_is_one_line_without_tensorflow():
    answers = without_tensorflow(*(words for words, _ in REFUSED))
    for (words, told), (code, out, err) in zip(REFUSED, answers, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert told in err and "forward_only:V" not in err, words


@pytest.mark.slow
def test_a_model_that_nothing_judges_never_ends_early(tmp_path):
    model = "--model=tests.training.small_models.PlainPoints"
    flags = ["--steps=9", "--eval_every=1", "--early_stop=1", "--dataset=none"]
    out = done("train", model, *flags, f"--logdir={tmp_path}")
    assert out.endswith(f"checkpoint: {tmp_path}/ckpt-9\n") and "held out" not in out


@pytest.mark.slow
def test_a_training_ends_early_where_nothing_gets_better(tmp_path):
    model = "--model=tests.training.small_models.PlainPoints"
    flags = ["--steps=300", "--eval_every=1", "--early_stop=3", f"--logdir={tmp_path}"]
    out = done("train", model, *flags)
    assert "stopped early: 3 evaluations were no better than " in out
    steps = [line for line in out.splitlines() if line.startswith("step ")]
    assert 3 < len(steps) < 300 and f"checkpoint: {tmp_path}/ckpt-{len(steps)}" in out


@pytest.mark.slow
def test_going_on_judges_the_step_that_was_the_last_one(tmp_path):
    """What early stop counts does not depend on where a training was interrupted."""
    model = "--model=tests.training.small_models.PlainPoints"
    flags = [model, "--eval_every=2", "--save_every=2", f"--logdir={tmp_path}"]
    done("train", *flags, "--steps=4")
    told = [line for line in done("train", *flags, "--steps=8").splitlines() if "held out" in line]
    assert [line.partition(":")[0] for line in told] == ["step 4", "step 6", "held out at step 8"]
    # A step is judged once.
    (tmp_path / "ckpt-8.index").unlink()
    told = [line for line in done("train", *flags, "--steps=8").splitlines() if "held out" in line]
    assert [line.partition(":")[0] for line in told] == ["held out at step 8"]


@pytest.mark.slow
def test_a_checkpoint_that_is_named_says_how_it_was_made(tmp_path):
    model = "--model=tests.training.small_models.PlannedPoints"
    out = done("train", model, "--steps=2", "--save_every=1", f"--logdir={tmp_path}", "--seed=7")
    score = out.partition("held out at step 2: ")[2].partition(" (")[0]
    # Later ones with another seed of weights, which is no matter of the first.
    done("train", "--steps=3", f"--logdir={tmp_path}", "--num_microbatches=4")
    path = tmp_path / "ckpt-2"
    config = tmp_path / "judge.toml"
    config.write_text(f'checkpoint = "{path}"\n')
    for words in ([f"--checkpoint={path}", f"--logdir={tmp_path}"], [f"--config={config}"]):
        out = done("evaluate", *words)
        assert "--seed=7" in out and "--num_microbatches" not in out
        assert out.endswith(f"{path}, step 2: {score}\n")
    assert "there is no checkpoint /no/such/ckpt-1" in refused(
        "evaluate", "--checkpoint=/no/such/ckpt-1"
    )


@pytest.mark.slow
def test_without_a_pipeline_a_layout_of_the_model_is_none(tmp_path):
    model = "--model=tests.training.small_models.SplitPoints"
    flags = [model, "--steps=2"]
    split = done("train", *flags, f"--logdir={tmp_path / 'split'}")
    assert "data:2" in split
    plain = done("train", *flags, "--plain", f"--logdir={tmp_path / 'plain'}")
    lines = [
        next(line for line in out.splitlines() if line.startswith("held out at step 2: "))
        for out in (split, plain)
    ]
    assert lines[0] == lines[1]


@pytest.mark.slow
def test_learning_rates_are_tried_without_a_training(tmp_path):
    model = "--model=tests.training.small_models.StagedPoints"
    out = done("train", model, f"--logdir={tmp_path}", "--find_learning_rate=60")
    assert "each with a higher learning rate" in out and "learning_rates.csv" in out
    assert [path.name for path in tmp_path.iterdir()] == ["learning_rates.csv"]
    # It is none of the flags that a training was begun with.
    out = done("train", model, f"--logdir={tmp_path}", "--steps=1")
    assert f"checkpoint: {tmp_path}/ckpt-1" in out
    words = ["train", f"--logdir={tmp_path}", "--find_learning_rate=60", "--trace_schedule"]
    assert "leave it or --find_learning_rate out" in refused(*words)


def test_flags_without_effect_are_named(tmp_path):
    def told(**values):
        return [line.split()[0] for line in without_effect(Options(logdir="runs/a", **values))]

    assert told(steps=50, early_stop=1, eval_every=100) == ["--early_stop=1"]
    assert told(steps=300, keep_best=1, save_every=70) == ["--keep_best=1"]
    assert not told(steps=301, early_stop=2, keep_best=1)
    # To go on with no step is to end a training that is done.
    assert not told(steps=0, early_stop=1, keep_best=1)


MODEL = "models.digits.params.DigitsPipelined"


@pytest.fixture(scope="module")
def logdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("predicted") / "run"
    done("train", f"--model={MODEL}", "--steps=5", f"--logdir={folder}")
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
