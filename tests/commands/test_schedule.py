"""`pipemesh schedule`, as a user types it."""

import json

import pytest

from pipemesh.commands.main import main
from pipemesh.commands.schedule import Row, compare, fit_costs, scale_limit, table
from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Costs,
    Schedule,
    from_csv,
    simulate,
    v_min,
    validate,
    write_csv,
    zb_h1,
)
from pipemesh.schedule.builders import BUILDERS, SLICED, build

SIZE = ["--devices", "4", "--num_microbatches", "8"]


def run(*words):
    return main(["schedule", *words])


def test_a_schedule_is_printed_and_every_file_written(tmp_path, capsys):
    files = {kind: tmp_path / f"a.{kind}" for kind in ("svg", "html", "trace", "csv", "text")}
    words = [word for kind, file in files.items() for word in (f"--{kind}", str(file))]
    assert run("--name", "zb_h1", *SIZE, *words, "--memory", str(tmp_path / "m.svg")) == 0
    out = capsys.readouterr().out
    assert "zb_h1: 4 devices, 4 stages, 8 microbatches" in out
    assert "device 3 |            3F0 3I0 3F1" in out
    line = "makespan 27, bubble 11.1% (at most 3 a device), own-span bubble at most 3, "
    assert line in out and "\x1b" not in out and out.count("wrote") == 6
    assert files["svg"].read_text().startswith("<svg")
    assert files["html"].read_text().startswith("<!DOCTYPE html>")
    assert len(json.loads(files["trace"].read_text())["traceEvents"]) > 96
    assert from_csv(files["csv"].read_text()) == zb_h1(4, 8)
    assert Schedule.from_text(files["text"].read_text()) == zb_h1(4, 8)
    for file in ("csv", "text"):
        assert run("--read", str(files[file])) == 0
        assert line in capsys.readouterr().out


@pytest.mark.parametrize("form", ["compute_comms", "zero_bubble"])
def test_csv_in_the_form_of_others(form, tmp_path, capsys):
    file = tmp_path / "a.csv"
    assert run("--name", "v_min", *SIZE, "--csv", str(file), "--csv_form", form) == 0
    assert file.read_text() == write_csv(v_min(4, 8), form)
    assert run("--read", str(file)) == 0
    assert "makespan 29.5" in capsys.readouterr().out.split("a.csv")[-1]


def test_costs_of_a_device_are_cut_into_its_stages(capsys):
    assert run("--name", "zb_v", *SIZE, "--costs", "forward=2,transfer=0.1") == 0
    assert "costs a stage: F 1, B 2, I 1, W 1, transfer 0.1" in capsys.readouterr().out
    assert run("--name", "zb_v", *SIZE, "--costs", "f=1:1:1:1:1:1:1:2") == 0
    assert "costs a stage: F 1:1:1:1:1:1:1:2, B 2:2:2:2:2:2:2:4" in capsys.readouterr().out


def test_a_searched_schedule_keeps_the_limit(tmp_path):
    file = tmp_path / "found.csv"
    costs = Costs([1, 1, 1, 2])
    words = ["--costs", "f=1:1:1:2", "--memory_limit", "4", "--csv", str(file)]
    assert run("--name", "list_schedule", *SIZE, *words) == 0
    found = validate(from_csv(file.read_text()))
    assert max(simulate(found, costs).peak_activations) <= 4
    assert simulate(found, costs).makespan <= simulate(zb_h1(4, 8), costs).makespan
    words = ["--num_virtual_stages", "2", "--memory_limit", "4:4:4:4", "--csv", str(file)]
    assert run("--name", "list_schedule", *SIZE, *words) == 0
    assert max(simulate(from_csv(file.read_text())).peak_activations) <= 8


def test_colour_is_chosen(capsys, monkeypatch):
    assert run("--name", "gpipe", *SIZE, "--color", "always") == 0
    assert "\x1b[48;2;" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    assert run("--name", "gpipe", *SIZE) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(len(line) for line in out.splitlines() if line.startswith("device")) <= 80


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "give one of --name, --compare and --read; none given"),
        ("--name gpipe --compare", "--name and --compare given"),
        ("--name gpipe", "--devices and --num_microbatches missing"),
        ("--name gpipe --devices 4", "--num_microbatches missing"),
        ("--name zbh1 SIZE", "unknown schedule 'zbh1'; did you mean 'zb_h1'"),
        ("--name gpipe --devices 0 --num_microbatches 1", "num_devices is 0"),
        ("--name gpipe --devices 1 --num_microbatches -1", "num_microbatches is -1"),
        ("--name gpipe SIZE --costs f=1:2", "costs have 2 values, but there are 4"),
        ("--name gpipe SIZE --costs fwd=1", "column 1: unknown cost 'fwd'"),
        ("--name gpipe SIZE --num_virtual_stages 2", "gpipe always has 1 a device"),
        ("--name gpipe SIZE --memory_limit 4", "--memory_limit is for list_schedule"),
        ("--name list_schedule SIZE --memory_limit x", "--memory_limit='x': give an integer"),
        ("--name gpipe SIZE --jitter 2", "jitter is 2.0"),
        ("--compare SIZE --svg x.svg", "--svg draws one schedule"),
        ("--compare SIZE --jitter 0.5", "--jitter is for one schedule"),
        ("--read /no/such.csv", "cannot read /no/such.csv: No such file"),
        ("--name gpipe SIZE --svg /no/such/x.svg", "--svg='/no/such/x.svg' cannot be written"),
        ("--read x.csv --devices 4", "--devices does not go with --read"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(words, message, capsys):
    assert run(*words.replace("SIZE", " ".join(SIZE)).split()) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("content", "told"),
    [
        (b"0: 0F0 0X0\n", "broken.txt: line 1, column 9: '0X0' is not an action"),
        (b"0: 0B0 0F0\n", "device 0, tick 0: 0B0 comes before 0F0"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (
            b"# costs of an action: forward=x\n0: 0F0 0B0\n",
            "broken.txt: costs, column 1: 'x' is not a number",
        ),
    ],
)
def test_a_broken_file_is_named_with_line_and_column(tmp_path, capsys, content, told):
    (tmp_path / "broken.txt").write_bytes(content)
    assert run("--read", str(tmp_path / "broken.txt")) == 2
    assert told in capsys.readouterr().err


def test_text_keeps_the_costs_and_csv_says_that_it_has_none(tmp_path, capsys):
    text, table = str(tmp_path / "a.txt"), str(tmp_path / "a.csv")
    words = ["--costs", "f=1:1:1:2,t=0.1", "--memory_limit", "4", "--text", text, "--csv", table]
    assert run("--name", "list_schedule", *SIZE, *words) == 0
    searched = capsys.readouterr().out
    first = next(line for line in searched.splitlines() if line.startswith("makespan"))
    for words in (["--read", text], ["--read", table, "--costs", "f=1:1:1:2,t=0.1"]):
        assert run(*words) == 0
        found = capsys.readouterr()
        assert first in found.out and not found.err
    assert run("--read", table) == 0
    found = capsys.readouterr()
    assert first not in found.out
    assert "note: a.csv does not say the costs" in found.err
    # What is given counts more than what is kept.
    assert run("--read", text, "--costs", "f=1") == 0
    assert "costs a stage: F 1, B 2" in capsys.readouterr().out


def test_round_off_is_no_bubble_and_jitter_is_repeatable(capsys):
    words = ("--devices", "1", "--num_microbatches", "8", "--costs", "f=0.1,b=0.3")
    assert run("--name", "1f1b", *words) == 0
    assert "bubble 0.0% (at most 0 a device), own-span bubble at most 0," in capsys.readouterr().out
    words = ("--name", "gpipe", *SIZE, "--jitter", "0.2", "--seed", "3")
    assert run(*words) == run(*words) == 0
    one, two = capsys.readouterr().out.split("gpipe: ")[1:]
    assert one == two


def test_every_training_schedule_has_a_row_and_does_the_same_work(capsys):
    words = ("--compare", "--devices=2", "--num_microbatches=4", "--costs=f=1:2,transfer=0.1")
    assert run(*words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:3] == ["schedule", "stages/device", "makespan"]
    assert len({len(line) for line in lines}) == 1
    rows, reasons = compare(Costs([1, 2], transfer=0.1), 2, 4)
    names = [row.name for row in rows]
    assert [line.split()[0] for line in lines[1:]] == names
    assert set(names) == set(BUILDERS) - {"forward_only", "decode"} | {*SLICED, "list_schedule"}
    for row in rows:
        assert sum(row.timeline.busy) == pytest.approx(3 * 4 * 3)
    # The searched one comes first of those of whole sequences.
    assert next(name for name in names if name not in SLICED) == "list_schedule"
    assert not reasons


def test_of_slices_a_device_holds_parts_of_microbatches():
    schedule = build("seq_one_f_one_b", 8, 32)
    costs = fit_costs(Costs(1, 2), 8, schedule.num_stages, schedule.num_slices)
    row = Row("seq_one_f_one_b", 1, simulate(schedule, costs))
    assert row.timeline.makespan == 32 * 3 + 7 * 3 / 4
    assert table([row], {}).splitlines()[1].split()[-3:-1] == ["11", "2.75"]


def test_a_memory_limit_holds_for_the_searched_ones():
    for row in compare(Costs(), 2, 4, memory_limit=1)[0]:
        if row.name == "list_schedule":
            assert max(row.timeline.peak_activations) <= row.virtual_stages
    assert scale_limit([1, 2], 2) == [2, 4]
    assert scale_limit(None, 2) is None
    with pytest.raises(ScheduleError, match="memory_limit of device 0 is 0"):
        compare(Costs(), 2, 4, memory_limit=0)


def test_sums_of_gradients_count_in_a_comparison():
    """They hide behind the stages of a device that still compute, where it has two."""
    rows, _ = compare(Costs(gradient_sum=20), 2, 4)
    assert [row.timeline.end for row in rows] == sorted(row.timeline.end for row in rows)
    assert rows[0].virtual_stages == 2
    assert "with sums" in table(rows, {})
    assert "with sums" not in table(*compare(Costs(), 2, 4))


def test_what_cannot_be_built_says_why():
    text = table(*compare(Costs(), 2, 3))
    assert "not possible: dual_pipe_v: num_microbatches is 3, but DualPipeV needs" in text
    assert "not possible: interleaved_one_f_one_b: num_microbatches is 3" in text
    # Virtual stages go to those that take them.
    stages = {row.name: row.virtual_stages for row in compare(Costs(), 2, 4, 3)[0]}
    assert stages["looped_bfs"] == stages["interleaved_one_f_one_b"] == 3
    assert (stages["zb_v"], stages["gpipe"]) == (2, 1)
