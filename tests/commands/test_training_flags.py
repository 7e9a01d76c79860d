"""Flags of training; `--mesh_shape=auto`: the choice, checked and kept like any other plan."""

import contextlib
import dataclasses
import io
import json
import re
import subprocess
import sys
import types

import pytest

from pipemesh.commands import plan as plan_command
from pipemesh.commands import training_flags
from pipemesh.commands.flags import FLAGS, Command, FlagError, parse
from pipemesh.commands.main import main
from pipemesh.commands.model_kind import REGISTERED
from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan, predict
from pipemesh.plan.figures import Figures, figures_of_costs
from pipemesh.plan.search import SearchSpace, search
from tests.commands.program import done, refused, without_tensorflow

MODEL = "--model=tests.training.small_models.PlannedPoints"


def parsed(*words):
    """Sets the flags of `pipemesh train`."""
    parse(["pipemesh train", *words], Command("pipemesh train", None, REGISTERED.flags))


@pytest.fixture
def figures(tmp_path):
    """Of three layers of which each takes so long that two places are best."""
    costs = [
        LayerCost(
            1.0, backward=2.0, parameter_bytes=100.0, activation_bytes=10.0, boundary_bytes=1.0
        )
    ] * 3
    found = Figures(tuple(figures_of_costs(costs, 8)), action=1e-3, batch=8)
    path = tmp_path / "figures.json"
    path.write_text(found.to_json())
    return found, path


@pytest.mark.slow
def test_the_best_plan_is_taken_said_kept_and_gone_on_with(tmp_path, figures):
    found, path = figures
    logdir = tmp_path / "run"
    flags = ["--mesh_shape=auto:2", f"--figures={path}", "--layout=", "--schedule=1f1b"]
    fixed = {"schedule": "1f1b", "layout": ""}
    best = search(found, SearchSpace(2, 8, fixed=fixed), count=1)[0].plan
    out = done("train", MODEL, *flags, "--steps=2", f"--logdir={logdir}")
    (line,) = [line for line in out.splitlines() if line.startswith("chosen for 2 devices: ")]
    assert f"--mesh_shape={best.mesh} " in line
    assert f"--num_microbatches={best.num_microbatches} " in line and "what binds" in line
    assert f"PlannedPoints: {best.mesh}" in out
    # Who goes on does not search again.
    out = done("train", f"--logdir={logdir}", "--steps=3")
    assert f"--mesh_shape={best.mesh}" in out and "chosen" not in out and "changed" not in out


def test_rates_are_tried_step_by_step():
    parsed(MODEL, "--steps_per_call=8", "--find_learning_rate=100")
    with pytest.raises(FlagError, match="--find_learning_rate may end after any step; leave one"):
        training_flags.options()
    parsed(MODEL, "--steps_per_call=8")
    assert training_flags.options()["steps_per_call"] == 8


def test_tokens_of_a_microbatch_set_their_number():
    parsed(MODEL, "--tokens_per_microbatch=64")
    assert training_flags.microbatches_of(lambda: (16, 32)) == {"num_microbatches": "8"}
    assert training_flags.microbatch_flag() == "tokens_per_microbatch"
    allowed = "Use one of 32, 64, 128, 256, 512$"
    for words, rows, length, told in (
        (["=48"], 16, 32, f"=48 does not divide a batch of 16 rows of 32 tokens .*{allowed}"),
        # Ten microbatches of a row and a half.
        (["=48"], 15, 32, "does not divide a batch of 15 rows"),
        (["=1024"], 16, 32, allowed),
        (["=64"], None, 32, "has no BATCH_SIZE and SEQUENCE_LENGTH.*; use --num_microbatches"),
        (["=64", "--num_microbatches=2"], 16, 32, "--num_microbatches=2 sets it; leave one out"),
    ):
        parsed(MODEL, f"--tokens_per_microbatch{words[0]}", *words[1:])
        with pytest.raises(FlagError, match=told):
            training_flags.microbatches_of(lambda: (rows, length))  # noqa: B023
    parsed(MODEL, "--tokens_per_microbatch=64", "--mesh_shape=auto:2")
    with pytest.raises(FlagError, match="chooses microbatches by itself"):
        training_flags.choose_plan("run")
    parsed(MODEL, "--num_microbatches=2")
    assert training_flags.microbatches_of(lambda: (None, None)) == {}


def test_given_microbatches_go_over_saved_tokens(tmp_path, monkeypatch):
    note = {"flags": {"tokens_per_microbatch": 64, "seed": 3}}
    monkeypatch.setattr(training_flags, "newest_note", lambda logdir: ("ckpt-1", note))
    parsed(MODEL, "--num_microbatches=2")
    training_flags.take_up(str(tmp_path))
    assert (FLAGS.tokens_per_microbatch, FLAGS.seed) == (None, 3)
    parsed(MODEL)
    training_flags.take_up(str(tmp_path))
    assert FLAGS.tokens_per_microbatch == 64


@pytest.fixture
def measuring(monkeypatch):
    """Lets `pipemesh plan` run in this process, with this in place of a measured model."""

    def run(words, **how):
        assert words[:3] == [sys.executable, "-m", "pipemesh"]
        assert how == {"capture_output": True, "text": True, "check": False}
        before, err = dict(vars(FLAGS)), io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
            code = main(words[3:])
        vars(FLAGS).update(before)
        return subprocess.CompletedProcess(words, code, "", err.getvalue())

    def measuring(model):
        monkeypatch.setattr(plan_command, "measured", model)
        monkeypatch.setattr(training_flags.subprocess, "run", run)

    return measuring


def test_steps_of_the_best_plans_are_run_if_that_is_requested(figures, measuring, capsys):
    tried = []

    def seconds(plans):
        tried.extend(plans)
        return [1.0, 0.5]

    measuring(lambda *_: types.SimpleNamespace(rows=8, seconds=seconds))
    flags = [f"--figures={figures[1]}", "--schedule=gpipe", "--device_memory=1GB"]
    parsed(MODEL, "--mesh_shape=auto:2", "--plan_trials=2", *flags)
    training_flags.choose_plan("run")
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("chosen for 2 devices: --mesh_shape=")
    assert "(500 ms a step in a trial, by forecast " in line
    assert float(re.search(r"by forecast ([\d.e+]+) ms", line)[1]) > 1e3
    _, second = tried
    assert FLAGS.given()["mesh_shape"] == str(second.mesh)
    assert FLAGS.num_microbatches == second.num_microbatches


def test_other_weights_or_optimizers_are_measured_anew(tmp_path, figures, measuring):
    seen = []

    def measured(flags):
        seen.append((flags.logdir, flags.optimizer, flags.lora_rank, flags.freeze))
        return types.SimpleNamespace(rows=8, figures=lambda: figures[0])

    measuring(measured)
    for words in ([], [], ["--optimizer=adamw"], ["--lora_rank=2", "--train_data=a.txt"]):
        parsed(MODEL, "--mesh_shape=auto:2", "--plan_trials=0", *words)
        training_flags.choose_plan(str(tmp_path / "run"))
    own = str(tmp_path / "run")
    assert seen == [(own, None, None, None), (own, "adamw", None, None), (own, None, 2, None)]
    found = Figures.read(str(tmp_path / "run" / "figures.json"))
    assert found == dataclasses.replace(figures[0], settings={"lora_rank": 2})


def test_a_model_that_cannot_be_measured_is_one_line(tmp_path, measuring):
    def measured(*_):
        raise PlanError("it has no PLAN")

    measuring(measured)
    parsed(MODEL, "--mesh_shape=auto:2")
    with pytest.raises(FlagError, match=r"the model cannot be measured: it has no PLAN$"):
        training_flags.choose_plan(str(tmp_path))
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_chosen_is_one_line_without_tensorflow(tmp_path, figures):
    other = tmp_path / "other.json"
    other.write_text(json.dumps({"layers": 3}))
    refusals = [
        (["--mesh_shape=auto:x"], "must be auto, or auto:N for N devices"),
        (["--mesh_shape=auto:2", "--plain"], "--plain computes on one device"),
        (["--mesh_shape=auto:2", "--lowering=simd"], "of which there are 0"),
        (["--mesh_shape=auto:2", "--plan_trials=-1"], "plan_trials"),
        (["--mesh_shape=auto:2", "--device_memory=7GiBB"], "--device_memory: '7GiBB' has the unit"),
        (["--mesh_shape=auto:2", "--device_memory=10"], "no plan fits into 10 bytes a device"),
        (["--mesh_shape=auto:2", "--schedule=1f1c"], "schedule"),
        (["--mesh_shape=auto:2", f"--figures={other}"], "has no figures of layers"),
    ]
    begin = ["train", MODEL, f"--figures={figures[1]}", f"--logdir={tmp_path / 'run'}"]
    answers = without_tensorflow(*([*begin, *words] for words, _ in refusals))
    for (words, told), (code, _, err) in zip(refusals, answers, strict=True):
        assert (code, err.count("\n")) == (2, 1) and told in err, (words, err)


@pytest.mark.slow
def test_memory_is_checked_before_the_first_step(tmp_path, figures):
    words = [MODEL, "--mesh_shape=layers:2", f"--figures={figures[1]}", "--device_memory=10"]
    logdir = tmp_path / "run"
    assert "no plan fits into 10 bytes" in refused("train", *words, f"--logdir={logdir}")
    assert not list(logdir.glob("ckpt*"))


def test_a_plan_that_does_not_fit_is_refused_with_the_nearest_that_does(figures):
    found, path = figures
    plan = Plan("layers:2", schedule="gpipe", num_microbatches=8, remat="none")
    held = max(predict(plan, found, 8).memory)
    parsed(MODEL, f"--figures={path}", f"--device_memory={held * 0.99}")
    nearest = "needs .*the nearest plan that fits is 'mesh=layers:2 schedule="
    with pytest.raises(FlagError, match=nearest) as error:
        training_flags.check_memory(plan, "run")
    # All but the schedule is as requested.
    told = str(error.value).partition("nearest")[2]
    assert "num_microbatches=8" in told and "remat=none" in told
    parsed(MODEL, f"--figures={path}", f"--device_memory={held * 1.01}")
    training_flags.check_memory(plan, "run")


STEPS = "give the first and the last step, such as 10:15"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("--profile_steps=10", f"^--profile_steps='10': {STEPS}"),
        ("--profile_steps=a:b", f"^--profile_steps='a:b': {STEPS}"),
        ("--profile_steps=0:3", "^--profile_steps='0:3': .*the first step is at least 1"),
        ("--profile_steps=5:4", "^--profile_steps='5:4': .*the last one not before it"),
        (
            "--profile_steps=2:10",
            "^--profile_steps='2:10': .*training ends at step 9; give more --steps",
        ),
        ("--profile_steps=2:3 --find_learning_rate=60", "leave it or --find_learning_rate out"),
        ("--find_learning_rate=5", "too few to find a range; give 50 or more"),
        (
            "--find_learning_rate=60 --trace_schedule",
            "--trace_schedule is for training; leave it or --find_learning_rate out",
        ),
        (
            "--find_learning_rate=60 --log_format=json",
            "--log_format=json is for training; leave it or --find_learning_rate out",
        ),
        ("--figures=x", "x cannot be read: No such file"),
        (
            "--histogram_every=5 --tracker=none",
            "--histogram_every=5: --tracker=none takes no histograms; add tensorboard or wandb",
        ),
    ],
)
def test_invalid_options_of_training_are_errors(words, told):
    parsed(MODEL, "--steps=9", *words.split())
    with pytest.raises((FlagError, PlanError), match=told):
        training_flags.options()


def test_a_resumed_run_keeps_its_tracker():
    parsed("--tracker=wandb")
    assert training_flags.saved_flags() == {"tracker": "wandb"}


def test_steps_to_profile_are_numbers():
    parsed(MODEL, "--profile_steps=3:4")
    assert training_flags.options()["profile_steps"] == (3, 4)
