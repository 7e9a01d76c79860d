"""Timelines in a terminal and as a trace."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipemesh.errors import ScheduleError
from pipemesh.report import to_svg, to_terminal, to_trace
from pipemesh.schedule import Costs, gpipe, one_f_one_b, simulate, zb_v
from pipemesh.schedule.builders import BUILDERS, build
from tests.report.drawings import uneven


def plain(text):
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def test_colours_change_no_text():
    timeline = simulate(zb_v(3, 6))
    colored = to_terminal(timeline, color=True)
    assert "\x1b[48;2;0;114;178;97m0F0\x1b[0m" in colored
    assert plain(colored) == to_terminal(timeline)


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(BUILDERS)), st.integers(1, 4), st.integers(40, 200), st.floats(0.1, 3)
)
def test_terminal_table_keeps_within_its_width(name, num_devices, width, forward):
    timeline = simulate(build(name, num_devices, 2 * num_devices), Costs(forward, transfer=0.3))
    for color in (False, True):
        lines = plain(to_terminal(timeline, color=color, width=width)).splitlines()
        assert len(lines) == num_devices
        assert max(map(len, lines)) <= width


def test_narrow_terminal_is_an_error():
    with pytest.raises(ScheduleError, match="width is 10; a table needs at least 30"):
        to_terminal(simulate(gpipe(1, 1)), width=10)


def test_narrow_cell_shows_kind_first():
    # 40 columns leave two for a forward and four for a backward, the last of each blank.
    assert to_terminal(simulate(one_f_one_b(2, 4), Costs(1, 2)), width=40) == (
        "device 0 |F F     0B0 F 0B1 F 0B2   0B3\ndevice 1 |  F 1B0 F 1B1 F 1B2 F 1B3"
    )


def test_sums_of_gradients_have_rows_of_their_own():
    timeline = simulate(one_f_one_b(2, 2), Costs(1, 2, gradient_sum=[2, 4]))
    assert to_terminal(timeline) == (
        "device 0 |0F0 0F1         0B0----     0B1----\n"
        "device 1 |    1F0 1B0---- 1F1 1B1----\n"
        "  link 0 |                                    0S-----\n"
        "  link 1 |                            1S-------------"
    )
    events = json.loads(to_trace(timeline, microseconds=1))["traceEvents"]
    sums = [
        (e["name"], e["tid"], e["ts"], e["dur"])
        for e in events
        if e.get("cat") == "sum of gradients"
    ]
    assert sums == [("1S", 3, 7, 4), ("0S", 2, 9, 2)]
    brief = to_terminal(simulate(one_f_one_b(2, 2), Costs(1, 2, gradient_sum=0.01)))
    assert brief.splitlines()[-1].endswith(" S")
    assert to_svg(timeline).count("sum of the gradients of stage") == 2


def test_fetches_of_weights_are_on_the_links_too():
    timeline = simulate(one_f_one_b(2, 1), Costs(1, 2, gradient_sum=1, all_gather=[1, 3]))
    assert to_terminal(timeline) == (
        "device 0 |    0F0                 0B0----\n"
        "device 1 |            1F0 1B0----\n"
        "  link 0 |0G-                             0S-\n"
        "  link 1 |1G---------             1S-"
    )
    events = json.loads(to_trace(timeline, microseconds=1))["traceEvents"]
    found = [(e["name"], e["tid"], e["ts"]) for e in events if e.get("cat") == "weights fetched"]
    assert found == [("0G", 2, 0), ("1G", 3, 0)]
    drawn = to_svg(timeline)
    assert drawn.count("fetch of the weights of stage") == 2 and "G weights fetched" in drawn


def test_trace_is_what_trace_viewers_read():
    timeline = simulate(zb_v(2, 4), Costs(transfer=0.5))
    trace = json.loads(to_trace(timeline, microseconds=10))
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for event, span in zip(slices, timeline.spans(), strict=True):
        assert event["name"] == str(span.action)
        assert (event["tid"], event["ts"]) == (span.device, pytest.approx(span.start * 10))
        assert event["dur"] == pytest.approx((span.end - span.start) * 10)
        assert event["args"] == {"stage": span.action.stage, "microbatch": span.action.microbatch}
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"]
    assert names == ["device 0", "device 1"]
    for device in range(2):
        name = f"activations of device {device}"
        held = [
            (e["ts"] / 10, e["args"]["held"]) for e in trace["traceEvents"] if e["name"] == name
        ]
        assert tuple(held) == timeline.activations(device)


def test_measured_step_is_a_second_process():
    predicted, measured = uneven()
    events = json.loads(to_trace(predicted, microseconds=1, measured=measured))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "predicted", 1: "measured"}
    for process, timeline in enumerate((predicted, measured)):
        starts = [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == process]
        assert starts == [span.start for span in timeline.spans()]
