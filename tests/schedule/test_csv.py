"""CSV for torch.distributed.pipelining: with its own loader where it is installed."""

import pytest
from hypothesis import given

from pipemesh.errors import ScheduleError
from pipemesh.schedule import (
    Schedule,
    build,
    from_csv,
    gpipe,
    looped_bfs,
    recompute,
    seq_one_f_one_b,
    v_half,
    write_csv,
    zb_h1,
)
from pipemesh.schedule.csv import CSV_FORMS
from pipemesh.schedule.simulate import lockstep
from tests.schedule.random_schedules import schedules

# Written by hand in the format that PyTorch 2.13 documents: [stage][F, B, I or W][microbatch].
ZB_H1 = """\
0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
"""


def test_csv_is_the_format_that_pytorch_documents():
    assert write_csv(zb_h1(2, 3)) == ZB_H1
    assert from_csv(ZB_H1) == zb_h1(2, 3)


def test_idle_cells_and_pytorchs_overlapped_pairs_are_read():
    text = "0F0,,(0F1;1B0)OVERLAP_F_B, 0I0 ,\r\n,\r\n"
    assert [[str(a) for a in row] for row in from_csv(text).rows] == [["0F0", "0F1", "1B0", "0I0"]]
    assert from_csv('"0F0","0B0"\n') == Schedule.from_text("0F0 0B0")
    assert from_csv("\ufeff0F0,0B0\n") == Schedule.from_text("0F0 0B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, column 6: '1X0' is not an action"),
        ("0F0,(0F1;1Q0)OVERLAP_F_B", "line 1, column 11: '1Q0' is not an action"),
        ("0SEND_F0,0F0", "line 1, column 1: '0SEND_F0' sends, .* no 0F0 before it"),
        ("0F0,0RECV_F0", "line 1, column 5: '0RECV_F0' receives, .* no 0F0 after it"),
        ("0F0,0B0,0RECV_B0", "'0RECV_B0' receives, but this device has no 0B0 or its I after it"),
        ("0F0,0B0\n0SEND_F1,1F0,1B0", "line 2, column 1: '0SEND_F1' sends, but"),
        ("0F0,0SEND_F0,0SEND_F0,0B0", "column 14: '0SEND_F0' is twice"),
        ("0F0,0B0,1REDUCE_GRAD", "'1REDUCE_GRAD' is for a stage that this device does not run"),
        ("0F0,0SEND_Q0", "column 6: '0SEND_Q0' is not an action"),
        ("F0,B0,0W0", "line 1, column 7: '0W0' is not an action; write one of FfBbWw"),
        ("", "holds no action"),
        (",,\n,", "holds no action"),
    ],
)
def test_malformed_csv_names_line_and_column(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)


# Typed by hand in PyTorch's compute_comms form: a schedule of two stages, weights sharded.
TORCH = """\
0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0I0,0W0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD
1UNSHARD,1RECV_F0,1F0,1RECV_F1,1I0,1SEND_B0,1F1,1W0,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD
"""
# Typed by hand in the letters of the zero-bubble authors: V of two devices.
LEGS = """\
F0,,,f0,B0,W0,,b0,w0
,F0,f0,,,B0,b0,W0,w0
"""


def test_communication_of_pytorch_is_checked_and_left_out():
    table = "0: 0F0 0F1 0I0 0W0 0B1\n1: 1F0 1I0 1F1 1W0 1B1"
    assert from_csv(TORCH) == Schedule.from_text(table)


def test_letters_of_the_zero_bubble_authors():
    table = "0: 0F0 3F0 3I0 3W0 0I0 0W0\n1: 1F0 2F0 2I0 1I0 2W0 1W0"
    assert from_csv(LEGS) == Schedule.from_text(table)
    assert from_csv("F0,,B0,W0\n,F0,B0,W0") == Schedule.from_text("0F0 0I0 0W0\n1F0 1I0 1W0")


@given(schedules)
def test_every_schedule_comes_back(schedule):
    pieces = schedule.by_pieces()
    assert from_csv(write_csv(pieces)) == pieces
    assert from_csv("\n".join(",".join(map(str, row)) for row in schedule.rows)) == schedule
    if not pieces.recomputed():
        assert from_csv(write_csv(pieces, "compute_comms")) == pieces


@pytest.mark.parametrize("name", ["zb_h1", "zb_h2", "zb_v", "v_half", "v_min"])
@pytest.mark.parametrize("counts", [(1, 1), (1, 3), (3, 2), (4, 9)])
def test_every_split_schedule_comes_back_from_letters(name, counts):
    schedule = build(name, *counts)
    text = write_csv(schedule, "zero_bubble")
    assert from_csv(text) == schedule
    # A cell a tick: all lines are as long as the clock runs.
    assert {line.count(",") + 1 for line in text.splitlines()} == {len(lockstep(schedule)[0])}


def test_ticks_are_those_of_the_published_figure():
    first = write_csv(v_half(4, 8), "zero_bubble").splitlines()[0].split(",")
    assert first[:10] == ["F0", "F1", "F2", "F3", "F4", "", "", "f0", "B0", "W0"]
    assert len(first) == 53


@pytest.mark.parametrize(
    ("schedule", "form", "message"),
    [
        # PyTorch reads `0F0.1` as `0F0` without a word; it refuses `0R0`.
        *(
            (seq_one_f_one_b(2, 2, 2), form, f"is a slice, and CSV of the form {form}")
            for form in CSV_FORMS
        ),
        *(
            (recompute(gpipe(2, 3)), form, f"0R1 is a recomputation, and CSV of the form {form}")
            for form in CSV_FORMS[1:]
        ),
        (gpipe(2, 2), "zero_bubble", "device 0: 0B1 is a whole backward, .* split it"),
        (looped_bfs(2, 2), "zero_bubble", r"\(0, 1, 0, 1\), .* for a V or for one stage a device"),
        (gpipe(2, 2), "compute_coms", "unknown form of CSV .*did you mean 'compute_comms'"),
    ],
)
def test_a_form_without_the_needed_cells_is_an_error(schedule, form, message):
    with pytest.raises(ScheduleError, match=message):
        write_csv(schedule, form)
