"""A schedule has the same names everywhere."""

import re
from unittest import mock

import pytest

from pipemesh.commands.main import main
from pipemesh.errors import PartitionError, ScheduleError
from pipemesh.partition import partition
from pipemesh.schedule import Schedule, ScheduleSpec, build, seq_one_f_one_b
from pipemesh.schedule.builders import BUILDERS, SLICED
from pipemesh.schedule.names import NAMES, help_text, listing, parse

SIZE = ["--devices", "2", "--num_microbatches", "4"]
SPELLINGS = [spelling for name, known in NAMES.items() for spelling in (name, known.short)]
SPELLINGS = [*filter(None, SPELLINGS), "1F1B", "ZB-H1", "Interleaved", "interleaved:2", "GPipe"]


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_names_the_same_schedule_everywhere(spelling, capsys, tmp_path):
    name = parse(spelling).name
    expected, stages = build(name, 2, 4), NAMES[name].stages_a_device
    assert build(spelling, 2, 4) == expected
    assert ScheduleSpec.from_text(spelling).build(2, 4) == expected
    plan = partition([1.0] * 8, 2 * stages, schedule=spelling, num_microbatches=4)
    assert plan.num_virtual_stages == stages
    assert plan == partition([1.0] * 8, 2 * stages, schedule=expected)
    # CSV cannot say slices.
    table = tmp_path / "table.txt"
    assert main(["schedule", "--name", spelling, *SIZE, "--text", str(table)]) == 0
    assert Schedule.from_text(table.read_text()) == expected
    assert main(["schedule", "--name", f"file:{table}"]) == 0
    capsys.readouterr()


def test_the_number_of_stages_a_device_may_stand_in_the_name():
    assert partition([1.0] * 8, 8, schedule="interleaved:4").num_virtual_stages == 4
    assert partition([1.0] * 8, 8, schedule="looped_bfs", num_virtual_stages=1) == partition(
        [1.0] * 8, 8, schedule="looped_bfs:1"
    )
    assert build("interleaved:3", 2, 4) == build("interleaved", 2, 4, 3)
    for differ in (
        lambda: build("interleaved:3", 2, 4, 2),
        lambda: partition([1.0] * 6, 6, schedule="interleaved:3", num_virtual_stages=2),
    ):
        with pytest.raises(ValueError, match="has 3 stages a device, but num_virtual_stages is 2"):
            differ()


def test_the_number_of_slices_may_stand_in_the_name():
    for spelling, slices in (("seq1f1b", 4), ("Seq-One-F-One-B:2", 2), ("seq1f1b:1", 1)):
        wanted = seq_one_f_one_b(2, 4, slices)
        assert build(spelling, 2, 4) == ScheduleSpec.from_text(spelling).build(2, 4) == wanted
        assert build(spelling, 2, 4, 1) == wanted
    assert build("seq1f1b:2:equal_work", 2, 4) == build("seq1f1b:2", 2, 4)
    assert parse("seq1f1b:2:Equal-Work").equal_work and not parse("seq1f1b:2").equal_work
    with pytest.raises(ScheduleError, match="num_virtual_stages is 2, but seq_one_f_one_b alway"):
        build("seq1f1b:2", 2, 4, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1f2b", "unknown schedule '1f2b'; did you mean '1f1b'"),
        ("gpip", "unknown schedule 'gpip'; did you mean 'gpipe'"),
        ("interleved:2", "did you mean 'interleaved'"),
        ("", "unknown schedule ''; there are gpipe, 1f1b"),
        ("zb_v:3", "zb_v always has 2 stages a device; write 'zb_v'"),
        ("1f1b:2", "1f1b always has 1 stages a device; write '1f1b'"),
        ("list_schedule:2", "list_schedule takes no number; write 'list_schedule'"),
        (
            "interleaved:",
            "'' is not a number of stages a device; write for example 'interleaved:2'",
        ),
        ("interleaved:0", "'0' is not a number of stages a device"),
        ("seq1f1b:x", "'x' is not a number of slices; write for example 'seq1f1b:2'"),
        ("seq1f1b:2:even", "write for example 'seq1f1b:2' or 'seq1f1b:2:equal_work'"),
        ("interleaved:2:equal_work", "'2:equal_work' is not a number of stages a device"),
        (None, "a schedule has a text as name, not None; there are gpipe"),
    ],
)
def test_a_name_that_is_none_is_the_same_error_everywhere(text, message):
    for use in (parse, ScheduleSpec.from_text, lambda name: build(name, 2, 4)):
        with pytest.raises(ScheduleError, match=re.escape(message)):
            use(text)
    if text is not None:
        with pytest.raises(PartitionError, match=re.escape(message)):
            partition([1.0] * 4, 2, schedule=text)


def test_a_searched_schedule_says_how_to_get_it_into_a_model():
    for use in (ScheduleSpec.from_text, lambda name: partition([1.0] * 4, 2, schedule=name)):
        with pytest.raises(ValueError, match=r"searched for costs.*--csv x\.csv.*'file:x\.csv'"):
            use("list_schedule")


def test_every_help_page_lists_every_spelling(capsys):
    for command in ("schedule", "partition"):
        with pytest.raises(SystemExit), mock.patch.dict("os.environ", {"COLUMNS": "200"}):
            main([command, "--help"])
        assert help_text() in capsys.readouterr().out
    for spelling in [*NAMES, "1f1b", "interleaved:V", "seq1f1b:Q", "file:PATH", "list_schedule"]:
        assert spelling in listing() and spelling in help_text()
    offered = listing(for_layers=True)
    for spelling in ("forward_only", "decode", "list_schedule"):
        assert spelling not in offered
        with pytest.raises(ScheduleError, match=r"^unknown schedule") as found:
            ScheduleSpec.from_text(f"{spelling}x")
        assert spelling not in str(found.value).replace(f"{spelling}x", "")
        assert str(found.value).endswith(f"there are {offered}")
    assert set(NAMES) == set(BUILDERS) | set(SLICED)
    assert max(map(len, help_text().splitlines())) <= 100
