"""Addresses of workers, by flags and by environment."""

import json

import pytest

from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster, cluster


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


MPI_NAMES = ["OMPI_COMM_WORLD_", "MV2_COMM_WORLD_", "PMI_"]


def as_rank(monkeypatch, names, rank, size):
    monkeypatch.setenv(f"{names}RANK", str(rank))
    monkeypatch.setenv(f"{names}SIZE", str(size))


@pytest.mark.parametrize("names", MPI_NAMES)
def test_workers_of_mpi_announce_themselves(monkeypatch, tmp_path, names):
    """The client is rank 1 of them, or none; it waits for the last worker."""
    folder = str(tmp_path / "job")
    for rank in (2, 3):
        as_rank(monkeypatch, names, rank, 4)
        cluster.announce(folder, f"n{rank}:5")
    as_rank(monkeypatch, names, 1, 4)
    late = []

    def sleep(seconds):
        late.append(seconds)
        (tmp_path / "job" / "worker-0-of-4").write_text("n0:5")

    monkeypatch.setattr(cluster.time, "sleep", sleep)
    ended = []
    monkeypatch.setattr(cluster.atexit, "register", ended.append)
    assert Cluster.from_text(f"mpi:{folder}", "s:1") == Cluster(("n0:5", "n2:5", "n3:5"), ("s:1",))
    assert len(late) == 1
    # Workers end when their files are gone.
    (end,) = ended
    end()
    assert not list((tmp_path / "job").iterdir())
    for rank in range(2):
        as_rank(monkeypatch, names, rank, 2)
        cluster.announce(folder, f"n{rank}:5")
    for name in ("RANK", "SIZE"):
        monkeypatch.delenv(names + name)
    assert Cluster.from_text(f"mpi:{folder}").workers == ("n0:5", "n1:5") and len(ended) == 1


def test_missing_workers_of_mpi_are_an_error(monkeypatch, tmp_path):
    monkeypatch.setattr(cluster, "_MPI_SECONDS", 0.0)
    with pytest.raises(DeviceError, match=r"write mpi:FOLDER, a shared folder that is new"):
        Cluster.from_text("mpi")
    with pytest.raises(DeviceError, match="has no worker at all after 0 s; start all by mpirun"):
        Cluster.from_text(f"mpi:{tmp_path}/none")
    with pytest.raises(
        DeviceError, match=r"neither OMPI_COMM_WORLD_RANK or .* is set; start it by"
    ):
        cluster.announce(str(tmp_path), "a:1")
    as_rank(monkeypatch, "PMI_", 0, 3)
    cluster.announce(str(tmp_path), "a:1")
    monkeypatch.delenv("PMI_RANK")
    with pytest.raises(DeviceError, match="has no worker of rank 1 after 0 s"):
        Cluster.from_text(f"mpi:{tmp_path}")
    as_rank(monkeypatch, "PMI_", 1, 2)
    with pytest.raises(DeviceError, match="workers of several jobs, of 2 and 3 processes; give"):
        Cluster.from_text(f"mpi:{tmp_path}")
    as_rank(monkeypatch, "PMI_", 0, 1)
    with pytest.raises(DeviceError, match="mpirun has started this client alone; start its"):
        Cluster.from_text(f"mpi:{tmp_path}/other")


def test_kubernetes_needs_a_package(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError, match="pip install kubernetes"):
        Cluster.from_text("kubernetes:app=worker")
