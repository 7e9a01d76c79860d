"""`pipemesh partition`, as a user runs it."""

import io
import json

import pytest

from pipemesh.cli import main
from pipemesh.partition import Partition

SIZE = ["--devices", "2", "--microbatches", "4"]
LAYERS = """name,forward,parameter_bytes,activation_bytes,boundary_bytes
a,1,1e9,2e9,1e6
b,1,1e9,2e9,1e6
c,1,1e9,2e9,1e6
d,1,1e9,2e9,1e6
e,1,1e9,2e9,1e6
f,1,1e9,2e9,1e6
"""


@pytest.fixture
def layers(tmp_path):
    path = tmp_path / "layers.csv"
    path.write_text(LAYERS)
    return str(path)


def test_a_table(layers, capsys):
    assert main(["partition", layers, "--stages", "3"]) == 0
    assert "3 stages, bottleneck 6 (stage 0)" in capsys.readouterr().out


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("[3, 1, 1, 3]"))
    assert main(["partition", "-", "--stages", "2", "--json"]) == 0
    assert Partition.from_json(capsys.readouterr().out).boundaries == (0, 2, 4)


def test_memory_with_units(layers, capsys):
    words = ["--memory-limit", "16GB", "--microbatches", "8", "--schedule", "one_f_one_b"]
    assert main(["partition", layers, "--stages", "3", *words]) == 0
    out = capsys.readouterr().out
    assert "bound by memory_limit" in out
    assert "of 14.9 GiB" in out


def test_all_options_reach_the_partitioner(layers, capsys):
    words = ["--speeds", "1,2", "--bandwidth", "1MB", "--overlap-transfers", "--remat", "full"]
    words += ["--virtual-stages", "2", "--same-stage", "0,1", "--min-layers", "1"]
    words += ["--max-layers", "3", "--fixed", "3", "--optimizer-bytes", "3", "--json"]
    assert main(["partition", layers, "--stages", "4", *words]) == 0
    plan = Partition.from_json(capsys.readouterr().out)
    assert plan.num_devices == 2
    assert 3 in plan.boundaries
    assert 1 not in plan.boundaries


def test_compare_and_plot(layers, capsys, tmp_path):
    picture = tmp_path / "out.svg"
    assert main(["partition", layers, "--stages", "4", "--compare", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "exact: layers" in out
    assert "uniform: layers" in out
    assert picture.read_text().count(">bottleneck") == 3
    assert main(["partition", layers, "--stages", "4", "--compare", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"exact", "lingvo", "uniform"}


def test_a_rule_that_breaks_an_option_does_not_end_a_comparison(layers, capsys):
    assert main(["partition", layers, "--stages", "4", "--compare", "--min-layers", "1"]) == 0
    assert main(["partition", layers, "--stages", "4", "--compare", "--max-layers", "2"]) == 0
    assert main(["partition", layers, "--stages", "2", "--compare", "--fixed", "2"]) == 0
    assert "uniform: the cut of method='uniform' breaks fixed" in capsys.readouterr().out


def test_schedules_that_only_a_table_tells_of_are_simulated(layers, capsys, tmp_path):
    words = ["--stages", "4", "--memory-limit", "30GB", "--microbatches", "4", "--json"]
    assert main(["partition", layers, *words, "--schedule", "zb_v"]) == 0
    plan = Partition.from_json(capsys.readouterr().out)
    assert plan.stage_devices == (0, 1, 1, 0)
    table = tmp_path / "table.csv"
    assert main(["schedule", "--name", "zb_v", *SIZE, "--csv", str(table)]) == 0
    capsys.readouterr()
    assert main(["partition", layers, *words, "--schedule", f"file:{table}"]) == 0
    assert Partition.from_json(capsys.readouterr().out) == plan
    assert main(["partition", layers, *words, "--stages", "3", "--schedule", f"file:{table}"]) == 2
    error = capsys.readouterr().err
    assert "3 stages were requested, but the schedule read from a file has 4 stages" in error
    assert main(["partition", layers, *words, "--stages", "3", "--schedule", "zb_v"]) == 2
    error = capsys.readouterr().err
    assert "3 stages were requested, but the schedule has 2 stages a device" in error
    assert main(["partition", layers, "--stages", "4", "--schedule", "zb_v"]) == 2
    assert "--schedule zb_v is simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nowhere.csv", "--stages", "2"], "cannot read nowhere.csv: No such file"),
        ([".", "--stages", "2"], "cannot read .: Is a directory"),
        (["LAYERS", "--stages", "9"], "6 layers allow 1 to 6 stages"),
        (["LAYERS", "--stages", "2", "--remat", "ful"], "did you mean 'full'"),
        (["LAYERS", "--stages", "2", "--method", "lingvo", "--compare"], "leave --method out"),
        (["LAYERS", "--stages", "2", "--plot", "/nowhere/x.svg"], "cannot write /nowhere/x.svg"),
        (
            ["LAYERS", "--stages", "2", "--memory-limit", "1GiB", "--microbatches", "2"],
            "memory_limit is too tight",
        ),
    ],
)
def test_errors_are_one_line_on_standard_error_and_code_2(words, message, layers, capsys):
    assert main(["partition", *(layers if word == "LAYERS" else word for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("pipemesh: error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory-limit", "16XB"], "has the unit 'XB'"),
        (["--memory-limit", "big"], "unit 'big'"),
        (["--memory-limit", "1.2.3GB"], "is no number of bytes"),
        (["--speeds", "1,fast"], "must be numbers such as"),
        (["--fixed", "1.5"], "must be layer indices such as"),
    ],
)
def test_arguments_that_cannot_be_read(words, message, layers, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["partition", layers, "--stages", "2", *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_help_and_unknown_commands(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "cut a stack of layers" in capsys.readouterr().out
    assert main(["partitoin"]) == 2
    assert "did you mean 'partition'" in capsys.readouterr().err
