"""Addresses of workers, by flags and by environment."""

import json

import pytest

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster


def test_addresses_are_listed_in_their_order():
    found = Cluster.from_text("b:1, a:2", "c:3")
    assert (found.workers, found.spares) == (("b:1", "a:2"), ("c:3",))


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "has no workers"), ("a:x", "'a:x' is not host:port"), ("a:1,a:1", "'a:1' occurs twice")],
)
def test_invalid_addresses_are_errors(text, told):
    with pytest.raises(DeviceError, match=told):
        Cluster.from_text(text)


def test_a_launched_program_finds_its_workers():
    cluster = Cluster(("a:1", "b:2"), ("c:3",))
    assert Cluster.from_environment({"TF_CONFIG": cluster.to_environment()}) == cluster
    assert Cluster.from_environment({}) is None
    assert Cluster.from_environment({"TF_CONFIG": "{}"}) is None


def test_the_variable_of_tensorflow_is_read(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", json.dumps({"cluster": {"worker": ["a:1"], "spare": ["b:1"]}}))
    assert Cluster.from_text("tf_config") == Cluster(("a:1",), ("b:1",))
    assert Cluster.from_text("tf_config", "c:1") == Cluster(("a:1",), ("c:1",))
    monkeypatch.delenv("TF_CONFIG")
    with pytest.raises(DeviceError, match="TF_CONFIG is not set"):
        Cluster.from_text("tf_config")


@pytest.mark.parametrize(
    "text",
    [
        *("{", "[]", "3", "[null]", '"a"', "\x00", "[" * 100_000, '{"cluster": []}'),
        *('{"cluster": {"worker": 5}}', '{"cluster": {"worker": "a:1"}}', '{"cluster": [1]}'),
        *('{"cluster": {"worker": ["a:1"], "spare": 7}}', '{"task": 3}', '{"task": [1]}'),
        *(f'{{"task": {{"type": "worker", "index": {i}}}}}' for i in ('"x"', "-1", "1.5", "[]")),
    ],
)
def test_malformed_configurations_are_errors(text):
    environment = {"TF_CONFIG": text}
    with pytest.raises(DeviceError, match="is not what TensorFlow takes: ") as error:
        Cluster.from_environment(environment)
    assert len(str(error.value)) < 500


@pytest.mark.parametrize("address", ["1", "null", '"a"', "[]", '"::1:5"'])
def test_a_configuration_has_addresses(address):
    for jobs in ('"worker": [{}]', '"worker": ["a:1"], "spare": [{}]'):
        text = f'{{"cluster": {{{jobs.format(address)}}}}}'
        with pytest.raises(DeviceError, match=r"TF_CONFIG: address .* is not host:port"):
            Cluster.from_environment({"TF_CONFIG": text})


@pytest.mark.parametrize("kind", ["worker", "spare"])
def test_a_worker_drives_no_others(kind):
    text = json.dumps({"cluster": {"worker": ["a:1"]}, "task": {"type": kind, "index": 0}})
    with pytest.raises(DeviceError, match=f"is a {kind} itself; run `pipemesh worker` there"):
        Cluster.from_environment({"TF_CONFIG": text})


# A batch script has the variables of the job, a step has its own.
@pytest.mark.parametrize(
    "names",
    [
        ("JOB_NODELIST", "TASKS_PER_NODE", "NTASKS"),
        ("STEP_NODELIST", "STEP_TASKS_PER_NODE", "STEP_NUM_TASKS"),
    ],
)
def test_slurm_says_where_its_tasks_are(monkeypatch, names):
    for name, value in zip(names, ("n[1-2],m7", "2(x2),1", "5"), strict=True):
        monkeypatch.setenv(f"SLURM_{name}", value)
    found = Cluster.from_text("slurm")
    assert found.workers == ("m7:8888", "n1:8888", "n1:8889", "n2:8888", "n2:8889")


def test_without_slurm_it_is_said(monkeypatch):
    for name in ("STEP_NODELIST", "JOB_NODELIST", "STEP_NUM_TASKS", "NTASKS"):
        monkeypatch.delenv(f"SLURM_{name}", raising=False)
    with pytest.raises(DeviceError, match="Slurm does not say where workers are"):
        Cluster.from_text("slurm")


def test_kubernetes_needs_a_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="pip install kubernetes"):
        Cluster.from_text("kubernetes:app=worker")
