"""The comparison of all schedules on one model."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Costs
from pipemesh.schedule.builders import BUILDERS, SLICED
from pipemesh.schedule.compare import compare, scale_limit, table


def test_every_training_schedule_has_a_row_and_does_the_same_work():
    rows = compare(Costs([1, 2, 1, 1], transfer=0.1), 4, 8)
    names = {row.name for row in rows}
    assert names == set(BUILDERS) - {"forward_only", "decode"} | {*SLICED, "list_schedule"}
    for row in rows:
        assert sum(row.timeline.busy) == pytest.approx(3 * 8 * 5)


def test_the_searched_schedule_comes_first_of_those_of_whole_sequences():
    for costs in (Costs(), Costs([1, 1, 1, 2]), Costs(1, input_grad=1.5, weight_grad=0.5)):
        names = [row.name for row in compare(costs, 4, 8) if row.name not in SLICED]
        assert names[0] == "list_schedule"


def test_of_slices_a_device_holds_parts_of_microbatches():
    (row,) = (row for row in compare(Costs(1, 2), 8, 32) if row.name == "seq_one_f_one_b")
    assert row.timeline.makespan == 32 * 3 + 7 * 3 / 4
    line = next(line for line in table([row]).splitlines() if "seq_one" in line)
    assert line.split()[-3:-1] == ["11", "2.75"]


def test_a_memory_limit_holds_for_the_searched_ones():
    for row in compare(Costs(), 4, 8, memory_limit=2):
        if row.name == "list_schedule":
            assert max(row.timeline.peak_activations) <= 2 * row.virtual_stages
    assert scale_limit([1, 2], 2) == [2, 4]
    assert scale_limit(None, 2) is None


def test_what_cannot_be_built_says_why():
    text = table(compare(Costs(), 4, 6))
    assert "not possible: dual_pipe_v: num_microbatches is 6, but DualPipeV needs" in text
    assert "not possible: interleaved_one_f_one_b: num_microbatches is 6" in text


def test_virtual_stages_go_to_those_that_take_them():
    stages = {row.name: row.virtual_stages for row in compare(Costs(), 2, 4, 3)}
    assert stages["looped_bfs"] == stages["interleaved_one_f_one_b"] == 3
    assert stages["zb_v"] == 2
    assert stages["gpipe"] == 1


def test_columns_line_up():
    lines = table(compare(Costs(), 4, 8)).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_bad_limits_and_counts_are_errors():
    with pytest.raises(ScheduleError, match="memory_limit of device 0 is 0"):
        compare(Costs(), 2, 4, memory_limit=0)
