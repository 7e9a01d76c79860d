"""A schedule before devices and microbatches are known."""

import re

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, ScheduleSpec, write_csv, zb_v
from pipemesh.schedule.builders import BUILDERS, build
from pipemesh.schedule.names import NAMES
from pipemesh.schedule.spec import read_table


@pytest.mark.parametrize("name", [*BUILDERS, "interleaved:3"])
def test_a_spec_builds_from_devices_and_from_stages(name):
    spec = ScheduleSpec.from_text(name)
    stages = 3 if name == "interleaved:3" else NAMES[name].stages_a_device
    assert spec.build(2, 8) == spec.for_stages(2 * stages, 8) == build(name, 2, 8, stages)


# Three stages on two devices, which no published schedule has.
TEXT = "0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0"
OTHER = "devices and {} microbatches were requested, but the schedule read from a file has 2"


@pytest.mark.parametrize(
    ("text", "method", "counts", "message"),
    [
        ("file:table.txt", "build", (3, 1), "3 " + OTHER.format(1)),
        ("file:table.txt", "build", (2, 4), "2 " + OTHER.format(4)),
        ("file:table.txt", "for_stages", (3, 2), "2 " + OTHER.format(2)),
        ("file:table.txt", "for_stages", (2, 1), "2 stages were requested, but the schedule read"),
        ("file:table.txt", "for_stages", (2, 1), "from a file has 3 stages; use the same number"),
        (
            "zb_v",
            "for_stages",
            (0, 4),
            "0 stages were requested, but the schedule has 2 stages a d",
        ),
        (
            "zb_v",
            "for_stages",
            (3, 4),
            "3 stages were requested, but the schedule has 2 stages a d",
        ),
        ("zb_v", "for_stages", (1, 4), "schedule has 2 stages a device; use a multiple of 2"),
    ],
)
def test_counts_that_do_not_fit_are_an_error(text, method, counts, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "table.txt").write_text(TEXT)
    table = ScheduleSpec.from_text("file:table.txt")
    assert table.build(2, 1) == table.for_stages(3, 1) == table.table == Schedule.from_text(TEXT)
    with pytest.raises(ScheduleError, match=re.escape(message)):
        getattr(ScheduleSpec.from_text(text), method)(*counts)


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


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # A name that ends in csv means CSV.
        ("a.CSV", b"0: 0F0 0B0", "line 1, column 2: '0: 0F0 0B0' is not an action"),
        ("a.txt", b"0: 0F0 0X0", "line 1, column 9: '0X0' is not an action"),
        ("a.txt", b"0F0,0X0", "line 1, column 6: '0X0' is not an action"),
        ("a.txt", b"0: 0B0 0F0", "device 0, tick 0: 0B0 comes before 0F0"),
        ("a.txt", b"", "the schedule holds no action"),
        ("a.txt", b"\xff\xfe", "it is not UTF-8 text; give the path of a file such as"),
        ("none.csv", None, "cannot read none.csv: No such file or directory"),
        (".", None, "cannot read .: Is a directory"),
        ("a\0b", None, "cannot read a\0b: "),
    ],
)
def test_errors_name_the_file(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ScheduleError) as error:
        read_table(name)
    assert name in str(error.value).splitlines()[0] and message in str(error.value)
    assert error.value.__cause__ is not None
