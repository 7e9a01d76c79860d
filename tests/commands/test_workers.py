"""Flags of devices and workers."""

import json

import pytest
import tensorflow as tf

from pipemesh.commands.flags import FLAGS, Flag, FlagError
from pipemesh.commands.workers import (
    HOST_FLAGS,
    connect,
    device_flags,
    device_type,
    start_devices,
)
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


@pytest.mark.parametrize("cluster", [None, "none"])
def test_no_worker_reads_data_where_there_is_none(monkeypatch, cluster):
    """With --cluster=none it was found when the model had been made."""
    monkeypatch.setenv("TF_CONFIG", "")
    FLAGS.declare([*HOST_FLAGS, Flag("read_data", default="workers")])
    FLAGS.set("cluster", cluster)
    with pytest.raises(FlagError, match=r"^--read_data=workers is for workers; give their addres"):
        connect()


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


def test_a_gpu_that_does_not_start_is_an_error_in_one_line(monkeypatch):
    """The first layer was blamed, whose shapes did not fit."""

    def list_logical_devices():
        raise tf.errors.InternalError(None, None, "cudaSetDevice() on GPU:0 failed. out of memory")

    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU:0"])
    monkeypatch.setattr("tensorflow.config.list_logical_devices", list_logical_devices)
    told = r"a GPU does not start \(cudaSetDevice.* memory\); end other programs that use it"
    with pytest.raises(FlagError, match=told):
        start_devices(Mesh.from_text("layers:1"), "GPU")
