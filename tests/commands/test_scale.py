"""`pipemesh scale`."""

import json

import pytest

from pipemesh.commands.main import main

COSTS = [{"forward": 1e-3, "parameter_bytes": 1e6, "boundary_bytes": 1e5, "name": "a"}] * 16


@pytest.fixture
def costs(tmp_path):
    path = tmp_path / "costs.json"
    path.write_text(json.dumps(COSTS))
    return str(path)


@pytest.fixture
def run(costs):
    """Runs the command with words, in which COSTS stands for the file."""
    return lambda words: main(["scale", *words.replace("COSTS", costs).split()])


def test_a_line_for_each_number_of_devices(run, tmp_path, capsys):
    out = tmp_path / "out.json"
    words = "COSTS --batch_size 512 --devices 8,64 --schedules 1f1b --failure_hours 1000 --parts"
    assert run(f"{words} --json {out}") == 0
    printed = capsys.readouterr().out
    header, eight, sixty_four, *rest = printed.splitlines()
    assert header.split()[:4] == ["devices", "mesh", "layout", "schedule"]
    assert (eight.split()[0], sixty_four.split()[0]) == ("8", "64")
    assert "seconds of a step, by part" in rest
    found = json.loads(out.read_text())
    assert found["64"]["rows_a_second"] > found["8"]["rows_a_second"]
    assert sum(found["8"]["parts"].values()) == pytest.approx(found["8"]["seconds"])


def test_layers_may_be_repeated_and_devices_be_faster(run, tmp_path):
    out = tmp_path / "out.json"
    found = []
    for more in ("", "--layers 32", "--faster 10"):
        assert run(f"COSTS --batch_size 64 --devices 4 {more} --json {out}") == 0
        found.append(json.loads(out.read_text())["4"]["parts"]["compute"])
    once, twice, fast = found
    assert twice == pytest.approx(2 * once)
    assert fast == pytest.approx(once / 10)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("none.json", "none.json cannot be read"),
        ("COSTS --devices 8,x", "give numbers from 1 on"),
        ("COSTS --layers 3", "the figures are of 16"),
        ("COSTS --devices 4 --schedules 1f1c", "unknown schedule"),
        ("COSTS --devices 4 --json /none/x", "--json='/none/x' cannot"),
        # All that divides by it would be infinite.
        ("COSTS --devices 4 --failure_hours 100 --storage 0", "storage is 0.0; it must be a numb"),
        ("COSTS --inside 1", "seconds of latency and bytes a second"),
        *(
            (f"COSTS --devices 4 {words}", f"error: {words.split()[0]}=")
            for words in (
                *("--faster 0", "--optimizer -1", "--notice -5", "--start nan"),
                *("--failure_hours 0", "--rows x", "--device_memory 80boxes", "--inside 1,2boxes"),
            )
        ),
    ],
)
def test_mistakes_are_one_line(run, words, told, capsys):
    assert run(f"{words} --batch_size 8") == 2
    assert told in capsys.readouterr().err
