"""A schedule before devices and microbatches are known."""

import re

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, ScheduleSpec, write_csv, zb_v
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.spec import read_table


@pytest.fixture
def table(tmp_path):
    """Three stages on two devices, which no published schedule has."""
    file = tmp_path / "table.txt"
    file.write_text("0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0")
    return ScheduleSpec.from_text(f"file:{file}")


@pytest.mark.parametrize("name", BUILDERS)
def test_a_spec_builds_from_devices_and_from_stages(name):
    spec = ScheduleSpec.from_text(name)
    assert spec.build(2, 8) == build(name, 2, 8, NAMES[name].stages_a_device)
    assert spec.for_stages(2 * spec.stages_a_device, 8) == spec.build(2, 8)


def test_an_open_number_of_stages_a_device_is_kept():
    spec = ScheduleSpec.from_text("interleaved:3")
    assert spec.build(2, 4) == build("interleaved_one_f_one_b", 2, 4, 3)
    assert spec.for_stages(6, 4) == spec.build(2, 4)


def test_a_file_gives_the_table_itself(table):
    expected = Schedule.from_text("0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0")
    assert table.build(2, 1) == table.for_stages(3, 1) == table.table == expected
    assert expected.stage_devices == (0, 0, 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (
            lambda spec: spec.build(3, 1),
            "3 devices and 1 microbatches were requested, but the schedule read from a file has 2",
        ),
        (
            lambda spec: spec.build(2, 4),
            "2 devices and 4 microbatches were requested, but the schedule read from a file has 2",
        ),
        (
            lambda spec: spec.for_stages(3, 2),
            "2 devices and 2 microbatches were requested, but the schedule read from a file has 2",
        ),
        (
            lambda spec: spec.for_stages(2, 1),
            "2 stages were requested, but the schedule read from a file has 3 stages; use the",
        ),
    ],
)
def test_a_file_is_for_the_counts_that_it_was_written_for(table, ask, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        ask(table)


@pytest.mark.parametrize("stages", [0, 1, 3, 5])
def test_stages_that_cannot_be_spread_are_an_error(stages):
    message = (
        f"{stages} stages were requested, but the schedule has 2 stages a device; use a multiple"
    )
    with pytest.raises(ScheduleError, match=message):
        ScheduleSpec.from_text("zb_v").for_stages(stages, 4)


TABLE = zb_v(2, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", write_csv(TABLE)),
        ("a.txt", write_csv(TABLE)),  # No colon is in it.
        ("a.txt", TABLE.to_text()),
        ("a", "# drawn by hand\n\n" + TABLE.to_text()),
    ],
)
def test_csv_and_text_are_told_apart(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert read_table(str(file)) == (TABLE, None)


def test_a_name_ending_in_csv_means_csv(tmp_path):
    file = tmp_path / "a.CSV"
    file.write_text(TABLE.to_text())
    with pytest.raises(ScheduleError, match=r"line 1, column 2: '0: 0F0 .*' is not an action"):
        read_table(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0: 0F0 0X0", "line 1, column 9: '0X0' is not an action"),
        (b"0F0,0X0", "line 1, column 6: '0X0' is not an action"),
        (b"0: 0B0 0F0", "device 0, tick 0: 0B0 comes before 0F0"),
        (b"0: 0F0\n1: 1F0 1B0", "device 0 never does 0B0"),
        (b"", "the schedule holds no action"),
        (b"\xff\xfe", "cannot read .*: it is not UTF-8 text; give the path of a file such as"),
    ],
)
def test_errors_name_the_file(tmp_path, content, message):
    file = tmp_path / "table.txt"
    file.write_bytes(content)
    with pytest.raises(ScheduleError, match=message) as error:
        read_table(str(file))
    assert str(file) in str(error.value).splitlines()[0]
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("path", "reason"),
    [("none.csv", "No such file or directory"), (".", "Is a directory"), ("a\0b", "")],
)
def test_unreadable_files_are_errors_with_the_reason(tmp_path, path, reason):
    with pytest.raises(ScheduleError, match=f"cannot read .*: {reason}"):
        read_table(str(tmp_path / path))
