"""Flags of programs that train."""

import json
import types

import pytest
from absl import flags as absl_flags

from pipemesh.training.command import flags


@pytest.fixture
def values(monkeypatch):
    """Flags of a program of its own."""
    found = absl_flags.FlagValues()
    absl_flags.DEFINE_string("max_tokens", None, "Tokens.", flag_values=found)
    absl_flags.DEFINE_bool("allow_idle", None, "Idle.", flag_values=found)
    monkeypatch.setattr(flags, "FLAGS", found)
    return found


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        ("--max-tokens=a-b", "--max_tokens=a-b"),
        ("--no-allow-idle", "--noallow_idle"),
        ("--noallow-idle", "--noallow_idle"),
        ("-- a well-known fact", "-- a well-known fact"),
        ("--of-others=1", "--of-others=1"),
        ("well-known", "well-known"),
    ],
)
def test_hyphens_of_flags_are_underscores_and_values_stay(values, word, wanted):
    assert flags._with_underscores(word) == wanted


@pytest.mark.parametrize(
    ("cluster", "config", "wanted"),
    [(None, "", "GPU"), (None, ["a:1"], "CPU"), ("none", ["a:1"], "GPU"), ("a:1", "", "CPU")],
)
def test_gpus_are_taken_where_no_workers_are_named(monkeypatch, cluster, config, wanted):
    """`pipemesh launch` names workers by TF_CONFIG: two of them would share one GPU."""
    text = json.dumps({"cluster": {"worker": config}}) if config else ""
    monkeypatch.setenv("TF_CONFIG", text)

    class Values(types.SimpleNamespace):
        def __contains__(self, name):
            return hasattr(self, name)

    monkeypatch.setattr(flags, "FLAGS", Values(cluster=cluster, device_type=None))
    monkeypatch.setattr("tensorflow.config.list_physical_devices", lambda kind: ["GPU:0", "GPU:1"])
    assert flags.device_type(2) == wanted
