"""A schedule before devices and microbatches are known."""

import re

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, ScheduleSpec
from pipemesh.schedule.builders import BUILDERS, build


@pytest.fixture
def table(tmp_path):
    """Three stages on two devices, which no published schedule has."""
    file = tmp_path / "table.txt"
    file.write_text("0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0")
    return ScheduleSpec.from_text(f"file:{file}")


@pytest.mark.parametrize("name", BUILDERS)
def test_from_devices_or_from_stages_it_is_what_the_builder_builds(name):
    spec = ScheduleSpec.from_text(name)
    assert spec.build(2, 8) == build(name, 2, 8, BUILDERS[name].virtual_stages)
    assert spec.for_stages(2 * spec.stages_a_device, 8) == spec.build(2, 8)


def test_an_open_number_of_stages_a_device_is_kept():
    spec = ScheduleSpec.from_text("interleaved:3")
    assert spec.build(2, 4) == build("interleaved_one_f_one_b", 2, 4, 3)
    assert spec.for_stages(6, 4) == spec.build(2, 4)


def test_what_stands_in_a_file_is_the_table_itself(table):
    expected = Schedule.from_text("0: 0F0 1F0 1B0 0B0\n1: 2F0 2B0")
    assert table.build(2, 1) == table.for_stages(3, 1) == table.table == expected
    assert expected.stage_devices == (0, 0, 1)


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda spec: spec.build(3, 1), "2 devices and 1 microbatches, but 3 devices and 1 micro"),
        (lambda spec: spec.build(2, 4), "2 devices and 1 microbatches, but 2 devices and 4 micro"),
        (lambda spec: spec.for_stages(3, 2), "2 devices and 1 microbatches, but 2 devices and 2"),
        (lambda spec: spec.for_stages(2, 1), "has 3 stages, but 2 stages are asked for; use the"),
    ],
)
def test_a_file_is_for_the_counts_that_it_was_written_for(table, ask, message):
    with pytest.raises(ScheduleError, match=re.escape(message)):
        ask(table)


@pytest.mark.parametrize("stages", [0, 1, 3, 5])
def test_stages_that_cannot_be_spread_are_an_error(stages):
    message = f"has 2 stages a device, but {stages} stages are asked for, which is no multiple"
    with pytest.raises(ScheduleError, match=message):
        ScheduleSpec.from_text("zb_v").for_stages(stages, 4)
