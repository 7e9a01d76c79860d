"""Tables in files."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import zb_v
from pipemesh.schedule.read import read_schedule

TABLE = zb_v(2, 4)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.csv", TABLE.to_csv()),
        ("a.txt", TABLE.to_csv()),  # No colon is in it.
        ("a.txt", TABLE.to_text()),
        ("a", "# drawn by hand\n\n" + TABLE.to_text()),
    ],
)
def test_csv_and_text_are_told_apart(tmp_path, name, text):
    file = tmp_path / name
    file.write_text(text)
    assert read_schedule(str(file)) == TABLE


def test_what_is_called_csv_is_read_as_such(tmp_path):
    file = tmp_path / "a.CSV"
    file.write_text(TABLE.to_text())
    with pytest.raises(ScheduleError, match=r"line 1, column 2: '0: 0F0 .*' is no action"):
        read_schedule(str(file))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"0: 0F0 0X0", "line 1, column 9: '0X0' is no action"),
        (b"0F0,0X0", "line 1, column 6: '0X0' is no action"),
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
        read_schedule(str(file))
    assert str(file) in str(error.value).splitlines()[0]
    assert error.value.__cause__ is not None


@pytest.mark.parametrize(
    ("path", "reason"),
    [("none.csv", "No such file or directory"), (".", "Is a directory"), ("a\0b", "")],
)
def test_what_cannot_be_read_is_an_error_with_the_reason(tmp_path, path, reason):
    with pytest.raises(ScheduleError, match=f"cannot read .*: {reason}"):
        read_schedule(str(tmp_path / path))
