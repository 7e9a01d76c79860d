"""`pipemesh train`, `evaluate` and `predict`, from the command line to the last line."""

import json

import numpy as np
import pytest

from models.digits.data import load_digits
from pipemesh.checkpoint.folder import set_aside
from pipemesh.checkpoint.manifest import WEIGHTS_ONLY
from pipemesh.commands import model_kind
from pipemesh.commands.flags import Command, FlagError, parse
from pipemesh.commands.model_kind import REGISTERED
from pipemesh.commands.runs import without_effect
from pipemesh.training import Options
from tests.checkpoint.made import make
from tests.commands.program import done, without_tensorflow

MODEL = "--model=models.digits.params.DigitsPlain"
SMALL = "--model=tests.training.small_models."


def test_layers_that_another_plan_only_moves_have_not_changed():
    """Of a model with three blocks 220 lines told of changes, and two of them were some."""
    stack = "task.stack.cell_tpl"
    before = {f"{stack}[0].sub[{i}].kind": kind for i, kind in enumerate("abc")}
    after = {f"{stack}[{i}].sub[0].kind": kind for i, kind in enumerate("abx")}
    # Of stages, too, there are more.
    before[f"{stack}[0].dtype"] = "float32"
    after |= {f"{stack}[{i}].dtype": "float32" for i in range(3)}
    told = model_kind._changes({"settings": before}, {"plan": {}, "settings": after})
    assert told == ["changed since the checkpoint: task.stack.layers[2].kind c -> x"]


def lines_of(out, begin):
    """The lines of an output that begin so, without that."""
    return [line.removeprefix(begin) for line in out.splitlines() if line.startswith(begin)]


def final_score(out, step):
    """The score of all held-out data after the last step, as `evaluate` prints it."""
    (line,) = lines_of(out, f"held out at step {step}: ")
    return line.partition(" (")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        "tests.training.small_models.SmallDigits",
        pytest.param("models.digits.params.DigitsPipelined", marks=pytest.mark.exhaustive),
        pytest.param("models.digits.params.DigitsPlain", marks=pytest.mark.exhaustive),
        pytest.param("models.digits.keras_model.DigitsKeras", marks=pytest.mark.exhaustive),
    ],
)
def test_a_model_trains_resumes_is_judged_and_predicts(tmp_path, model):
    flags = ["train", f"--model={model}", "--save_every=3", f"--logdir={tmp_path}"]
    done(*flags, "--steps=3")
    # The model is known by then.
    out = done("train", "--steps=5", f"--logdir={tmp_path}")
    assert f"resuming with saved flags: --model={model} --save_every=3" in out
    assert f"going on from {tmp_path}/ckpt-3" in out
    score = final_score(out, 5)
    assert "accuracy 0." in score
    test = [f"--logdir={tmp_path}", "--dataset=Test"]
    judged = done("evaluate", f"--logdir={tmp_path}").splitlines()[-1]
    assert judged == f"{tmp_path}/ckpt-5, step 5: {score}"

    def predictions(*flags):
        values = list(map(json.loads, done("predict", *test, *flags).splitlines()))
        assert [each["number"] for each in values] == list(range(len(values)))
        return np.array([each["predictions"] for each in values])

    found = predictions()
    np.testing.assert_allclose(predictions("--plain"), found, rtol=1e-4, atol=1e-4)
    labels = load_digits()[1].labels
    assert len(found) == len(labels)
    accuracy = np.mean(found.argmax(-1) == labels)
    assert f"accuracy {accuracy:.3f}" in done("evaluate", *test).splitlines()[-1]
    ((_, _, err),) = without_tensorflow(["score", f"--logdir={tmp_path}", "--prompt=a"])
    assert f"the checkpoint is of {model}, which says nothing of decoding" in err


@pytest.mark.slow
def test_another_plan_is_told_and_judges_alike(tmp_path):
    """A number that has changed since the checkpoint, as a seed, ended a training."""
    logdir = f"--logdir={tmp_path}"
    out = done("train", f"{SMALL}SplitPoints", "--steps=2", "--seed=7", logdir)
    assert "mesh=layers:2;data:2" in out
    score = final_score(out, 2)
    # Without a pipeline a layout of the model is none.
    assert done("evaluate", logdir, "--plain").endswith(f"step 2: {score}\n")
    # Later ones with another seed of weights, which is no matter of the first.
    other = ["--mesh_shape=layers:2", "--layout=", "--num_microbatches=4", "--seed=8"]
    out = done("train", "--steps=3", logdir, *other)
    assert "changed since the checkpoint: mesh layers:2;data:2 -> layers:2\n" in out
    assert " 7 -> 8\n" in out
    path = tmp_path / "ckpt-2"
    (tmp_path / "judge.toml").write_text(f'checkpoint = "{path}"\n')
    out = done("evaluate", f"--config={tmp_path / 'judge.toml'}")
    assert "--seed=7" in out and "--num_microbatches" not in out
    assert out.endswith(f"{path}, step 2: {score}\n")


@pytest.mark.parametrize(
    ("flag", "told"),
    [
        ("--mesh_shape=layers:2", "has no PipeliningLayer"),
        ("--trace_schedule", "no pipeline of single actions to time"),
    ],
)
def test_what_a_model_lacks_is_told(monkeypatch, flag, told):
    monkeypatch.setattr(model_kind, "_start", lambda mesh: None)
    parse(["pipemesh train", MODEL, flag], Command("pipemesh train", None, REGISTERED.flags))
    with pytest.raises(FlagError, match=told):
        model_kind.subject()


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
    (["train", MODEL, "--optimizer=adamv"], "--optimizer='adamv': it must be one of adam|adamw|"),
    (["train", MODEL, "--optimizer=sgd", "--weight_decay=0.1"], "--weight_decay=0.1: sgd has none"),
    (["evaluate"], "cannot tell which model to use"),
    (["evaluate", "--logdir=/no/such/run", "--eval-batches=2"], "--eval_batches is for training"),
    (["evaluate", "--logdir=/no/such/run", "--elastic"], "--elastic is for training"),
    (["evaluate", "--logdir=/no/such/run"], "has no checkpoint; train first"),
    (["evaluate", "--checkpoint=/no/such/ckpt-1"], "there is no checkpoint /no/such/ckpt-1"),
    (["predict"], "cannot tell which model to use"),
    (["predict", "--logdir=/no/such/run", MODEL], "has no checkpoint"),
]


def test_what_cannot_be_had_is_one_line_without_tensorflow():
    answers = without_tensorflow(*(words for words, _ in REFUSED))
    for (words, told), (code, out, err) in zip(REFUSED, answers, strict=True):
        assert (code, out, err.count("\n")) == (2, "", 1), (words, err)
        assert told in err and "forward_only:V" not in err, words


@pytest.mark.slow
def test_learning_rates_are_tried_without_a_training(tmp_path):
    flags = [f"{SMALL}PlainPoints", f"--logdir={tmp_path}", "--find_learning_rate=50"]
    out = done("train", *flags)
    assert "each with a higher learning rate" in out and "learning_rates.csv" in out
    assert [path.name for path in tmp_path.iterdir()] == ["learning_rates.csv"]


def test_flags_without_effect_are_named(tmp_path):
    def told(**values):
        return [line.split()[0] for line in without_effect(Options(logdir="runs/a", **values))]

    assert told(steps=50, early_stop=1, eval_every=100) == ["--early_stop=1"]
    assert told(steps=300, keep_best=1, save_every=70) == ["--keep_best=1"]
    assert not told(steps=301, early_stop=2, keep_best=1)
    # To go on with no step is to end a training that is done.
    assert not told(steps=0, early_stop=1, keep_best=1)


def test_a_run_whose_checkpoints_are_damaged_keeps_its_flags(tmp_path):
    """It begins anew with the imported weights, which say nothing of what is trained."""
    make(tmp_path, 0, note={"flags": {"model": "a.B"}, WEIGHTS_ONLY: True})
    make(tmp_path, 5, note={"flags": {"model": "a.B", "freeze": "x"}})
    set_aside(str(tmp_path / "ckpt-5"))
    words = [f"--logdir={tmp_path}", "--schedule=none"]
    ((_, out, err),) = without_tensorflow(["train", *words])
    assert out == "resuming with saved flags: --model=a.B --freeze=x\n"
    assert err.startswith("error: --schedule='none'")


def test_a_training_of_adapters_that_is_lost_is_none_of_all_weights(tmp_path):
    """It went on with the flags of the run before, all weights trained."""
    make(tmp_path, 1, note={"flags": {"model": "a.B"}})
    (tmp_path / "ckpt-2.index").touch()
    words = ["train", f"--logdir={tmp_path}", "--schedule=none"]
    for rank, begin in (
        (8, f"error: {tmp_path}/ckpt-2 had the flags of the run, which"),
        (0, "error: --schedule"),
    ):
        (tmp_path / "config.toml").write_text(
            'model = "a.B"\n' + f"lora_rank = {rank}\n" * (rank > 0)
        )
        ((_, _, err),) = without_tensorflow(words)
        assert err.startswith(begin)
