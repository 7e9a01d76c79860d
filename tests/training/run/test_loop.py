"""What the loop of training tells of the first steps."""

import functools
import types

from pipemesh.training.run.loop import Loop


def told(seconds):
    """What is said of a step of 1 GFLOP on devices of 1 GFLOP/s that takes so many seconds."""
    trained = types.SimpleNamespace(all_devices=lambda: ["CPU:0"])
    subject = types.SimpleNamespace(unit="rows")
    found = {}
    loop = types.SimpleNamespace(
        _measured_steps=0,
        _seconds=0.0,
        _flops=1e9,
        _peak=1e9,
        _rate=1.0,
        _options=types.SimpleNamespace(steps=1),
        _trainer=types.SimpleNamespace(step=1, subject=subject, trained=trained),
        _tell=lambda kind, text, **values: found.update(values, text=text),
    )
    loop._mfu = functools.partial(Loop._mfu, loop)
    Loop._measured(loop, seconds)
    return found


def test_more_than_the_measured_peak_is_no_mfu():
    """Other programs ran when the peak was measured."""
    found = told(2.0)
    assert found["mfu"] == 0.5 and "MFU 50.0% of 1 GFLOP/s" in found["text"]
    found = told(0.5)
    assert "mfu" not in found
    assert "MFU not known: more than the 1 GFLOP/s that were measured at the start" in found["text"]
