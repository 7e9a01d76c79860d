"""Flags of devices and workers."""

import json

import pytest

from pipemesh.commands.flags import FLAGS, FlagError
from pipemesh.commands.workers import HOST_FLAGS, device_flags, device_type, start_devices
from pipemesh.mesh import Mesh


@pytest.mark.parametrize(
    ("cluster", "config", "wanted"),
    [(None, "", "GPU"), (None, ["a:1"], "CPU"), ("none", ["a:1"], "GPU"), ("a:1", "", "CPU")],
)
def test_gpus_are_taken_where_no_workers_are_named(monkeypatch, cluster, config, wanted):
    """`pipemesh launch` names workers by TF_CONFIG: two of them would share one GPU."""
    text = json.dumps({"cluster": {"worker": config}}) if config else ""
    monkeypatch.setenv("TF_CONFIG", text)
    FLAGS.declare([*device_flags(None, None, "", ""), *HOST_FLAGS])
    FLAGS.set("cluster", cluster)
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    assert device_type(2) == wanted


@pytest.mark.parametrize(
    ("kind", "count", "told"),
    [
        ("GPU", 99, "needs 99 GPUs, but .*use a smaller mesh or --device_type=CPU"),
        ("CPU", 65, "at most 64 logical"),
    ],
)
def test_too_few_devices_are_refused(kind, count, told):
    with pytest.raises(FlagError, match=told):
        start_devices(Mesh.from_text(f"layers:{count}"), kind)
