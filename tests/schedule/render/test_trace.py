"""The trace of a timeline."""

import json

import pytest

from pipemesh.schedule import Costs, simulate, zb_v
from pipemesh.schedule.render import to_trace
from tests.schedule.render.drawings import uneven


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
    held = [e["args"]["held"] for e in trace["traceEvents"] if e["ph"] == "C"]
    assert max(held) == max(timeline.peak_activations)


def test_what_was_measured_is_a_process_of_its_own_below():
    predicted, measured = uneven()
    events = json.loads(to_trace(predicted, microseconds=1, measured=measured))["traceEvents"]
    named = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert named == {0: "predicted", 1: "measured"}
    for process, timeline in enumerate((predicted, measured)):
        starts = [e["ts"] for e in events if e["ph"] == "X" and e["pid"] == process]
        assert starts == [span.start for span in timeline.spans()]


def test_a_counter_follows_what_each_device_holds():
    timeline = simulate(zb_v(2, 4), Costs(transfer=0.5))
    events = json.loads(to_trace(timeline, microseconds=1))["traceEvents"]
    for device in range(2):
        name = f"activations of device {device}"
        curve = [(e["ts"], e["args"]["held"]) for e in events if e["name"] == name]
        assert tuple(curve) == timeline.activations(device)
