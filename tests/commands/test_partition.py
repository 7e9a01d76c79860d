"""`pipemesh partition`, as a user runs it."""

import io
import json

import pytest

from pipemesh.commands.main import main
from pipemesh.commands.partition import comparison, read_costs
from pipemesh.errors import PartitionError
from pipemesh.partition import LayerCost, Partition, partition

SIZE = ["--devices", "2", "--num_microbatches", "4"]
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


def test_a_table_and_memory_with_units(layers, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(LAYERS))
    assert main(["partition", "-", "--stages", "3"]) == 0
    assert "3 stages, bottleneck 6 (stage 0)" in capsys.readouterr().out
    words = ["--device_memory", "16GB", "--num_microbatches", "8", "--schedule", "one_f_one_b"]
    assert main(["partition", layers, "--stages", "3", *words]) == 0
    out = capsys.readouterr().out
    assert "bound by --device_memory" in out and "of 14.9 GiB" in out


def test_all_options_reach_the_partitioner(layers, capsys):
    words = ["--speeds", "1,2", "--bandwidth", "1MB", "--overlap_transfers", "--remat", "full"]
    words += ["--num_virtual_stages", "2", "--same_stage", "0,1", "--min_layers", "1"]
    words += ["--max_layers", "3", "--fixed", "3", "--optimizer_bytes", "3", "--json"]
    assert main(["partition", layers, "--stages", "4", *words]) == 0
    plan = Partition.from_json(capsys.readouterr().out)
    assert plan.num_devices == 2
    assert 3 in plan.boundaries
    assert 1 not in plan.boundaries


def test_compare_and_plot(layers, capsys, tmp_path):
    picture = tmp_path / "out.svg"
    assert main(["partition", layers, "--stages", "4", "--compare", "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert out.endswith(f"\nwrote {picture}\n")
    assert "exact: layers" in out
    assert "uniform: layers" in out
    assert picture.read_text().count(">bottleneck") == 3
    assert main(["partition", layers, "--stages", "4", "--compare", "--json"]) == 0
    assert set(json.loads(capsys.readouterr().out)) == {"exact", "lingvo", "uniform"}
    # A rule that breaks an option does not end a comparison.
    assert main(["partition", layers, "--stages", "2", "--compare", "--fixed", "2"]) == 0
    assert "uniform: the cut of method='uniform' breaks fixed" in capsys.readouterr().out


def test_schedules_that_only_a_table_tells_of_are_simulated(layers, capsys, tmp_path):
    table = tmp_path / "table.csv"
    assert main(["schedule", "--name", "zb_v", *SIZE, "--csv", str(table)]) == 0
    capsys.readouterr()

    def run(schedule, stages, *words):
        words = ["--device_memory=30GB", f"--schedule={schedule}", f"--stages={stages}", *words]
        code = main(["partition", layers, "--json", *words])
        out, err = capsys.readouterr()
        return Partition.from_json(out) if code == 0 else err

    plan = run("zb_v", 4, "--num_microbatches=4")
    assert plan.stage_devices == (0, 1, 1, 0)
    assert run(f"file:{table}", 4, "--num_microbatches=4") == plan
    for schedule, what in (
        (f"file:{table}", "schedule read from a file has 4 stages"),
        ("zb_v", "schedule has 2 stages a device"),
    ):
        told = run(schedule, 3, "--num_microbatches=4")
        assert f"3 stages were requested, but the {what}" in told
    assert "schedule 'zb_v' is simulated to count what its stages hold; give --num_m" in run(
        "zb_v", 4
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("nowhere.csv", "cannot read nowhere.csv: No such file"),
        (".", "cannot read .: Is a directory"),
        ("LAYERS --stages 9", "6 layers allow 1 to 6 stages"),
        ("LAYERS --remat ful", "did you mean 'full'"),
        ("LAYERS --method lingvo --compare", "leave --method out"),
        ("LAYERS --plot /nowhere/x.svg", "--plot='/nowhere/x.svg' cannot be written"),
        ("LAYERS --device_memory 1GiB --num_microbatches 2", "--device_memory is too tight"),
        ("LAYERS --device_memory 16XB", "has the unit 'XB'"),
        ("LAYERS --device_memory big", "unit 'big'"),
        ("LAYERS --device_memory 1.2.3GB", "is no number of bytes"),
        ("LAYERS --speeds 1,fast", "must be numbers such as"),
        ("LAYERS --fixed 1.5", "must be layer indices such as"),
    ],
)
def test_errors_are_one_line_on_standard_error_and_code_2(words, message, layers, capsys):
    words = words.replace("LAYERS", layers).split()
    assert main(["partition", "--stages=2", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("1\n2.5\n\n3e2\n", [1.0, 2.5, 300.0]),
        ("# made by hand\ncost\n1\n2\n", [1.0, 2.0]),
        ("\ufeffname,cost\r\na,1\r\nb,2\r\n", [1.0, 2.0]),
        ("[1, 2.5]", [1, 2.5]),
        ("Forward, name\n1, 'a'\n", [LayerCost(1.0, name="'a'")]),
        (
            "name,forward,backward,parameter_bytes\na,1,,8\nb,2,3,\n",
            [
                LayerCost(1, backward=None, parameter_bytes=8, name="a"),
                LayerCost(2, backward=3, name="b"),
            ],
        ),
        ("1\r2\r", [1, 2]),
        ('[{"cost": 1, "name": "a"}, {"cost": 2}]', [1, 2]),
        ('[{"forward": 1, "name": "a"}, {"forward": 2}]', [LayerCost(1, name="a"), LayerCost(2)]),
    ],
)
def test_forms_of_costs(text, costs):
    assert read_costs(text, "costs.csv") == costs


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "costs.csv is empty"),
        ("# nothing\n", "no lines but comments"),
        ("cost\n", "a header and no layers"),
        ("1\n-2\n", "line 2: cost is -2.0, but every cost must be zero or more"),
        ("1\nnan\n", "line 2: cost is nan"),
        ('["1"]', "layer 0: cost is '1', but must be a number"),
        ("a;b\n1;2\n", "separate columns with commas"),
        ("cost\n1\nx\n", "line 3: cost is 'x', but must be a number"),
        ("1,2\n", "2 columns and no header"),
        ("forwards\n1\n", "line 1: 'forwards' is no known column.*did you mean forward"),
        ("name\na\n", "has neither a column cost nor a column forward"),
        ("cost,forward\n1,1\n", "has cost beside forward"),
        ("cost,cost\n1,1\n", "names a column twice"),
        ("forward,name\n1\n", "line 2 has 1 cells, but the header has 2"),
        ("forward\n-1\n", "line 2: forward is -1.0"),
        ("[1, 2", "no valid JSON"),
        ('{"costs": [1]}', "must hold a list"),
        ('[{"forward": 1}, 2]', "layer 1 is 2 among objects"),
        ('[{"flops": 1}]', "layer 0: 'flops' is no known column"),
        ('[{"name": "a"}]', "layer 0 has no forward"),
        ('[{"cost": 1}, {"name": "b"}]', "layer 1 has no cost"),
        ('[{"cost": 1, "forward": 2}]', "has cost beside forward"),
        ('[{"cost": "1"}]', "layer 0: cost is '1', but must be a number"),
        ('[{"forward": 1, "name": 5}]', "layer 0: name of a layer is 5, but must be a string"),
        ("[" * 100_000, "nested too deeply"),
        ("[" + "1" * 5000 + "]", "costs.csv"),
        ("1\n" + "2" * 200_000, "line 2 is no CSV: field larger"),
        ('[{"forward": "1"}]', "layer 0: forward is '1', but must be a number"),
    ],
)
def test_errors_of_costs_say_where(text, message):
    with pytest.raises(PartitionError, match=message):
        read_costs(text, "costs.csv")


def test_each_method_has_its_layers_its_costs_and_a_summary():
    plans = {
        "exact": Partition((0, 2, 4), (4.0, 4.0)),
        "uniform": Partition((0, 4, 4), (8.0, 0.0), method="uniform"),
    }
    text, reasons = comparison(plans), {"lingvo": "breaks a"}
    assert comparison(reasons) == "lingvo: breaks a"
    assert comparison(plans | reasons) == f"{text}\nlingvo: breaks a"
    assert [line.split() for line in text.splitlines()] == [
        ["stage", "exact:", "layers", "cost", "uniform:", "layers", "cost"],
        ["0", "0-1", "4", "0-3", "8"],
        ["1", "2-3", "4", "-", "0"],
        ["-" * len(text.splitlines()[0])],
        ["bottleneck", "4", "8"],
        ["over", "the", "best", "0%", "+100.0%"],
        ["balance", "1.000", "0.500"],
        ["empty", "stages", "0", "1"],
    ]


def test_of_many_stages_the_first_and_the_last_are_shown():
    for stages in (64, 65, 500):
        lines = comparison({"exact": partition([1.0] * stages, stages)}).splitlines()
        rows, numbers = [line.split()[0] for line in lines[1:-5]], list(map(str, range(stages)))
        assert rows == (numbers if stages == 64 else [*numbers[:32], "...", *numbers[-32:]])
