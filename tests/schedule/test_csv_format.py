"""CSV for torch.distributed.pipelining: with its own loader where it is installed."""

import pytest

from pipemesh.errors import ScheduleError
from pipemesh.schedule import Schedule, from_csv, to_csv, zb_h1
from pipemesh.schedule.builders import BUILDERS, build

CASES = [(name, 3, 6) for name in BUILDERS if BUILDERS[name].trains]

# Written by hand in the format that PyTorch 2.13 documents: [stage][F, B, I or W][microbatch].
ZB_H1 = """\
0F0,0F1,0I0,0W0,0F2,0I1,0W1,0I2,0W2
1F0,1I0,1F1,1I1,1W0,1F2,1I2,1W1,1W2
"""


def test_text_is_what_pytorch_documents():
    assert to_csv(zb_h1(2, 3)) == ZB_H1
    assert from_csv(ZB_H1) == zb_h1(2, 3)


@pytest.mark.parametrize(("name", "num_devices", "num_microbatches"), CASES)
def test_pytorchs_own_loader_reads_it(name, num_devices, num_microbatches, tmp_path):
    schedules = pytest.importorskip(
        "torch.distributed.pipelining.schedules", reason="PyTorch is not installed"
    )
    schedule = build(name, num_devices, num_microbatches)
    file = tmp_path / "schedule.csv"
    file.write_text(to_csv(schedule))
    # A runtime without stages: everything that loading looks at, and nothing that would run.
    runtime = object.__new__(schedules._PipelineScheduleRuntime)
    runtime.pipeline_order = {}
    runtime.pp_group_size = schedule.num_devices
    runtime._num_stages = schedule.num_stages
    runtime._n_microbatches = schedule.num_microbatches
    runtime._stages = []
    runtime._defer_pp_recv = False
    runtime._load_csv(str(file), format="compute_only")
    for device, row in enumerate(schedule.rows):
        assert list(map(str, runtime.pipeline_order[device])) == list(map(str, row))
        computed = [
            str(action)
            for action in runtime.pipeline_order_with_comms[device]
            if action.computation_type in (schedules.F, schedules.B, schedules.I, schedules.W)
        ]
        assert computed == list(map(str, row))
    homes = {stage: device for stage, device in enumerate(schedule.stage_devices)}
    assert runtime.stage_index_to_group_rank == homes


def test_idle_cells_and_pytorchs_overlapped_pairs_are_read():
    text = "0F0,,(0F1;1B0)OVERLAP_F_B, 0I0 ,\r\n,\r\n"
    assert [[str(a) for a in row] for row in from_csv(text).rows] == [["0F0", "0F1", "1B0", "0I0"]]
    assert from_csv('"0F0","0B0"\n') == Schedule.from_text("0F0 0B0")
    assert from_csv("\ufeff0F0,0B0\n") == Schedule.from_text("0F0 0B0")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n1F0,1X0", "line 2, column 6: '1X0' is no action"),
        ("0F0,(0F1;1Q0)OVERLAP_F_B", "line 1, column 11: '1Q0' is no action"),
        ("0SEND_F0,0F0", "line 1, column 1: '0SEND_F0' sends, .* no 0F0 before it"),
        ("0F0,0RECV_F0", "line 1, column 5: '0RECV_F0' receives, .* no 0F0 after it"),
        ("0F0,0B0,0RECV_B0", "'0RECV_B0' receives, but this device has no 0B0 or its I after it"),
        ("0F0,0B0\n0SEND_F1,1F0,1B0", "line 2, column 1: '0SEND_F1' sends, but"),
        ("0F0,0SEND_F0,0SEND_F0,0B0", "column 14: '0SEND_F0' stands twice"),
        ("0F0,0B0,1REDUCE_GRAD", "'1REDUCE_GRAD' is for a stage that this device does not run"),
        ("0F0,0SEND_Q0", "column 6: '0SEND_Q0' is no action"),
        ("F0,B0,0W0", "line 1, column 7: '0W0' is no action; write one of FfBbWw"),
        ("", "holds no action"),
        (",,\n,", "holds no action"),
    ],
)
def test_malformed_csv_names_line_and_column(text, message):
    with pytest.raises(ScheduleError, match=message):
        from_csv(text)
