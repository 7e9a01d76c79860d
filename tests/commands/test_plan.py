"""`pipemesh plan` with figures that were measured before."""

import dataclasses
import json
import math
import subprocess
import sys
import types

import pytest

from pipemesh.commands import plan as command
from pipemesh.commands.flags import FlagError
from pipemesh.commands.main import main
from pipemesh.errors import PlanError
from pipemesh.partition import LayerCost
from pipemesh.plan import Plan
from pipemesh.plan.figures import Figures, figures_of_costs


@pytest.fixture
def figures(tmp_path):
    costs = [
        LayerCost(
            1e-3, backward=2e-3, parameter_bytes=8e6, activation_bytes=4e6, boundary_bytes=2e6
        )
    ] * 8
    found = Figures(tuple(figures_of_costs(costs, 1)), action=1e-5, batch=16, about="a test")
    path = tmp_path / "figures.json"
    path.write_text(found.to_json())
    return str(path)


def test_the_best_plans_are_printed_with_what_binds(figures, tmp_path, capsys):
    out = tmp_path / "plans.json"
    words = ["plan", figures, "--devices=4", "--fix=mesh=layers:4", "--parts", f"--json={out}"]
    assert main(words) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "figures: a test; a batch of 16 rows"
    assert told[1].split() == [
        *("mesh", "layout", "schedule", "microbatches", "boundaries", "remat"),
        *("step", "ms", "bubble", "memory", "MB", "binds"),
    ]
    values = json.loads(out.read_text())
    assert len(values) == 5
    best = Plan.from_values(values[0]["plan"])
    assert told[-1] == f"best: {best}"
    assert best.mesh.num_stages == 4
    seconds = [each["seconds"] for each in values]
    assert seconds == sorted(seconds)
    parts = told[told.index("milliseconds of a step, by part") + 1 :]
    assert parts[0].split()[:2] == ["plan", "compute"] and parts[1].startswith(f"{best} ")
    first = told[2].split()
    assert first[0] == "layers:4" and float(first[6]) == pytest.approx(1e3 * seconds[0], rel=1e-3)
    assert first[-1] == values[0]["binds"]
    # No plan needs more memory; the output says that seconds of a dtype are not forecast.
    words = ["plan", figures, "--devices=4", "--fix=schedule=1f1b", f"--json={out}"]
    words += ["--device_memory=100MB", "--fix=compute_dtype=bfloat16"]
    assert main(words) == 0
    assert all(max(each["memory"]) <= 100e6 for each in json.loads(out.read_text()))
    assert "as long in bfloat16 as it was measured" in capsys.readouterr().out
    assert main([*words, "--fix=compute_dtype=float32"]) == 0
    assert "note" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("", "give either --model"),
        ("FIGURES --model a.B", "give either --model"),
        ("none.json", "none.json cannot be read: No such file or directory; give a file that `pip"),
        ("FIGURES --save x", "--save is for what is measured"),
        ("FIGURES --trials 3", "give --model=package.module.Class"),
        ("FIGURES --trials -1", "--trials=-1: it must be at least 0"),
        ("FIGURES --fix schedule", "must be NAME=VALUE"),
        ("FIGURES --fix shedule=1f1b", "did you mean 'schedule'?"),
        ("FIGURES --fix schedule=1f1c", "unknown schedule"),
        ("FIGURES --devices 0", "--devices=0: it must be at least 1"),
        ("FIGURES --batch_size 0", "--batch_size=0: it must be at least 1"),
        ("FIGURES --json /none/x", "--json='/none/x' cannot be written"),
        ("FIGURES --fix mesh=layers:4", "4 devices, but there are 2"),
        (
            "--model none.Model --fix layout=d_ff:rows",
            "fix the mesh as well, such as mesh=layers:1;",
        ),
        ("FIGURES --fix remat=fulll", "did you mean 'full'?"),
        ("FIGURES --count 0", "--count=0: it must be at least 1"),
        ("FIGURES --device_memory 1MB", "no plan fits into 1,000,000 bytes a device"),
    ],
)
def test_mistakes_are_one_line(figures, words, told, capsys):
    words = words.replace("FIGURES", figures).split()
    assert main(["plan", "--devices=2", *words]) == 2
    assert told in capsys.readouterr().err


def test_costs_need_a_batch_size(tmp_path, capsys):
    costs = tmp_path / "costs.json"
    costs.write_text('[{"forward": 1.0}, {"forward": 1.0}]')
    assert main(["plan", str(costs), "--devices=2", "--batch_size=8"]) == 0
    assert main(["plan", str(costs), "--devices=2"]) == 2
    assert "give --batch_size" in capsys.readouterr().err


@pytest.fixture
def run(monkeypatch):
    """Runs the command with a model in place of a measured one."""

    def run(words, model):
        monkeypatch.setattr(command, "measured", model)
        return command.main(["pipemesh plan", *words])

    return run


def test_files_are_checked_before_anything_is_measured(tmp_path, run):
    for flag in ("--save", "--json"):
        words = ["--model=a.B", "--devices=2", f"{flag}={tmp_path}"]
        with pytest.raises(FlagError, match=f"{flag}=.* cannot be written"):
            run(words, lambda *_: pytest.fail("measured"))
    assert not list(tmp_path.iterdir())


class Model:
    """Takes the longer, the more microbatches a plan has, which no forecast says."""

    rows = 16

    def __init__(self, *_):
        pass

    def seconds(self, plans):
        return [float(plan.num_microbatches) for plan in plans]


def test_plans_that_are_tried_come_in_the_order_of_what_they_took(figures, tmp_path, capsys, run):
    out = tmp_path / "plans.json"
    words = [figures, "--devices=4", "--fix=mesh=layers:4", "--count=6"]
    assert run([*words, f"--json={out}"], None) == 0
    before = [Plan.from_values(each["plan"]) for each in json.loads(out.read_text())]
    assert "trial" not in capsys.readouterr().out
    tried = [*words, "--model=a.B", "--trials=4", f"--json={out}"]
    assert run(tried, Model) == 0
    values = json.loads(out.read_text())
    after = [Plan.from_values(each["plan"]) for each in values]
    assert after[:4] == sorted(before[:4], key=lambda plan: plan.num_microbatches)
    assert after[:4] != before[:4] and after[4:] == before[4:]
    assert [each.get("trial") for each in values] == [
        *(plan.num_microbatches for plan in after[:4]),
        *(None, None),
    ]
    told = capsys.readouterr().out.splitlines()
    assert told[1].endswith("trial ms") and told[-1] == f"best: {after[0]}"
    assert float(told[2].split()[-1]) == 1e3 * after[0].num_microbatches
    assert told[7].split()[-1] == "-"
    told = r"a batch of a\.B has 16 examples, so trials cannot have 32"
    with pytest.raises(PlanError, match=told):
        run([*tried, "--batch_size=32"], Model)


def test_a_plan_that_the_model_does_not_support_is_left_out(figures, tmp_path, capsys, run):
    out = tmp_path / "plans.json"
    words = [figures, "--devices=4", "--fix=mesh=layers:4", "--count=3", f"--json={out}"]
    tried = [*words, "--model=a.B", "--trials=3"]
    took = [math.inf, 2.0, 1.0]

    def model(*_):
        return types.SimpleNamespace(rows=16, seconds=lambda plans: took)

    assert run(words, None) == 0
    before = json.loads(out.read_text())
    assert run(tried, model) == 0
    values = json.loads(out.read_text())
    assert [each["trial"] for each in values] == [1.0, 2.0]
    assert [each["plan"] for each in values] == [before[2]["plan"], before[1]["plan"]]
    capsys.readouterr()
    took[1:] = [math.inf] * 2
    with pytest.raises(PlanError, match="supports none of the 3 plans that were tried"):
        run(tried, model)


def test_trials_beside_a_file_say_how_much_slower_the_machine_is_now(
    figures, tmp_path, capsys, run
):
    """All forecasts are by one factor longer; without room for a plain step none is run."""
    out = tmp_path / "plans.json"

    def plans(*words):
        fixed = ["--devices=4", "--fix=schedule=1f1b"]
        assert run([figures, *fixed, f"--json={out}", *words], Model) == 0
        values = json.loads(out.read_text())
        return {str(Plan.from_values(each["plan"])): each["seconds"] for each in values}

    before = plans()
    found = Figures.read(figures)
    with open(figures, "w") as file:
        file.write(dataclasses.replace(found, plain_step=0.8).to_json())
    capsys.readouterr()
    # The model's plain step has one microbatch, for which it takes a second.
    after = plans("--model=a.B", "--trials=2")
    assert after == pytest.approx({plan: 1.25 * seconds for plan, seconds in before.items()})
    told = capsys.readouterr().out.splitlines()
    assert told[1] == (
        "a reference step now takes 1.25 of the time it took when measured; forecasts are scaled "
        "accordingly"
    )
    # Where the plain plan is among those that are tried no other one is run.
    seen = []
    fixed = ["--fix=mesh=layers:1", "--fix=num_microbatches=1", "--fix=remat=none"]
    model = types.SimpleNamespace(
        rows=16, seconds=lambda plans: seen.extend(plans) or [1.0] * len(plans)
    )
    tried = [figures, "--devices=4", *fixed, "--model=a.B", "--trials=2"]
    assert run(tried, lambda *_: model) == 0
    assert len(seen) == 1 and "takes 1.25" in capsys.readouterr().out
    # One device would hold 64 MB of weights, as many of gradients, and twice as much besides.
    plans("--model=a.B", "--trials=2", "--device_memory=200MB")
    assert "a reference step" not in capsys.readouterr().out


def test_figures_are_enough_without_tensorflow(figures):
    code = (
        "import sys; from pipemesh.commands.main import main; "
        f"a = main(['plan', {figures!r}, '--devices=2', '--fix=schedule=1f1b', '--batch_size=8']); "
        f"b = main(['scale', {figures!r}, '--batch_size=8', '--devices=4', '--schedules=gpipe']); "
        "sys.exit(a or b or 'tensorflow' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
