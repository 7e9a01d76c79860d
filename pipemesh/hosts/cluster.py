"""The addresses of workers: from a command line, `TF_CONFIG`, Slurm, Kubernetes or MPI."""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import importlib.util
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.addresses import check_addresses
from pipemesh.errors import DeviceError

TF_CONFIG, SLURM, KUBERNETES, MPI = "tf_config", "slurm", "kubernetes", "mpi"
# The default port of workers, as in TensorFlow's resolvers.
PORT = 8888
# The loopback address, and the names for all addresses.
LOOPBACK, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")
_WORKER, _SPARE = "worker", "spare"
# Number of characters of a malformed text that an error shows.
_SHOWN = 200
# The most Slurm tasks on a node.
_MOST_TASKS = 1024
# Rank and number of processes, as Open MPI, MVAPICH, and MPICH or Intel MPI set them.
_RANKS = (
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
# The file of a worker of MPI; seconds that a client waits for all of them, and between two looks.
_ANNOUNCED = re.compile(r"worker-(\d+)-of-(\d+)", re.ASCII)
_MPI_SECONDS, _MPI_PAUSE = 600.0, 0.5


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of workers.

    Attributes:
        workers: `host:port` of each worker, in order.
        spares: `host:port` of workers that replace lost ones.
    """

    workers: tuple[str, ...]
    spares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.workers:
            raise DeviceError("a cluster has no workers; give host:port of one or more")
        check_addresses([*self.workers, *self.spares])

    @classmethod
    def from_text(cls, text: str, spares: str = "") -> Cluster:
        """Returns the workers from a command line.

        Args:
            text: addresses separated by commas, or their source: `tf_config`, `slurm`,
                `kubernetes:LABEL=VALUE` or `mpi:FOLDER`.
            spares: addresses separated by commas.

        Returns:
            The cluster.

        Raises:
            DeviceError: there is no address, or one is malformed.

        Example:
            >>> Cluster.from_text("a:1,a")
            Traceback (most recent call last):
            pipemesh.errors.DeviceError: address 'a' is not host:port; write for example 'a:2222'
        """
        kind, _, selector = text.partition(":")
        extra = _listed(spares)
        if text == TF_CONFIG:
            named = cls.from_environment()
            if named is None:
                raise DeviceError(
                    "TF_CONFIG is not set, or has no cluster with a job 'worker'; give host:port "
                    "of each worker"
                )
            return cls(named.workers, extra or named.spares)
        if text == SLURM:
            return cls(_of_slurm(), extra)
        if kind == KUBERNETES:
            return cls(_of_kubernetes(selector), extra)
        if kind == MPI:
            return cls(_of_mpi(selector), extra)
        return cls(_listed(text), extra)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Cluster | None:
        """Returns the workers from the variable `TF_CONFIG`.

        Its job `worker` lists the workers, its job `spare` their replacements.

        Args:
            environment: the variables. Default: those of this process.

        Returns:
            The cluster; None if the variable names no worker.

        Raises:
            DeviceError: the variable is malformed, or describes this process as a worker.

        Example:
            >>> Cluster.from_environment({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'})
            Cluster(workers=('a:1',), spares=())
        """
        environment = os.environ if environment is None else environment
        text = environment.get("TF_CONFIG", "")
        if not text.strip():
            return None
        jobs, kind = _read(text)
        if not jobs[_WORKER]:
            return None
        if kind in (_WORKER, _SPARE):
            raise DeviceError(
                f"TF_CONFIG says that this process is a {kind} itself; run `pipemesh worker` "
                "there, and this command once, with a task of another type or none"
            )
        try:
            return cls(*map(tuple, jobs.values()))
        except DeviceError as error:
            raise DeviceError(f"TF_CONFIG: {error}") from error

    def to_environment(self) -> str:
        """Returns `TF_CONFIG` for a client of these workers.

        Returns:
            JSON text.

        Example:
            >>> Cluster(("a:1",)).to_environment()
            '{"cluster": {"worker": ["a:1"]}, "task": {"type": "client", "index": 0}}'
        """
        jobs = {_WORKER: list(self.workers)}
        if self.spares:
            jobs[_SPARE] = list(self.spares)
        return json.dumps({"cluster": jobs, "task": {"type": "client", "index": 0}})


def _read(text: str) -> tuple[dict[str, list[Any]], str]:
    """Returns the addresses in `TF_CONFIG` by job, unchecked, and the type of this process."""
    try:
        config = _mapping(json.loads(text) if text.strip() else {}, "it")
        cluster = _mapping(config.get("cluster"), "'cluster'")
        task = _mapping(config.get("task"), "'task'")
        jobs = {name: cluster.get(name) or [] for name in (_WORKER, _SPARE)}
        for name, addresses in jobs.items():
            if not isinstance(addresses, list):
                raise ValueError(f"{name!r} is no list of addresses")
        kind, index = task.get("type"), task.get("index")
        if kind in (_WORKER, _SPARE) and (isinstance(index, bool) or not str(index).isdecimal()):
            raise ValueError(f"'index' is {index!r}, and must be a number")
        return jobs, str(kind)
    except (ValueError, RecursionError) as error:
        shown = text if len(text) < _SHOWN else f"{text[:_SHOWN]}..."
        raise DeviceError(
            f"TF_CONFIG={shown!r} is not what TensorFlow takes: {error}; write for example "
            '{"cluster": {"worker": ["a:2222", "b:2222"]}}'
        ) from error


def _mapping(value: Any, what: str) -> dict[str, Any]:
    if value is not None and not isinstance(value, dict):
        raise ValueError(f"{what} is no JSON object")
    return value or {}


def _listed(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",")) if text else ()


def _of_slurm() -> tuple[str, ...]:
    """Returns the workers of a Slurm job, one a task, in the order of TensorFlow's resolver."""
    for name, of_job in (
        ("STEP_NODELIST", "JOB_NODELIST"),
        ("STEP_TASKS_PER_NODE", "TASKS_PER_NODE"),
        ("STEP_NUM_TASKS", "NTASKS"),
    ):
        if f"SLURM_{name}" not in os.environ and f"SLURM_{of_job}" in os.environ:
            os.environ[f"SLURM_{name}"] = os.environ[f"SLURM_{of_job}"]
    os.environ.setdefault("SLURM_PROCID", "0")
    import tensorflow as tf

    try:
        # Slurm assigns GPUs to workers, and the resolver lists at most one task for each GPU.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=PORT, gpus_per_node=_MOST_TASKS, gpus_per_task=1, auto_set_gpu=False
        )
        addresses = resolver.cluster_spec().as_dict()["worker"]
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"Slurm does not say where workers are: {error}") from error
    return _addresses(addresses)


def _of_kubernetes(selector: str) -> tuple[str, ...]:
    """Returns the pods with a label, as TensorFlow's resolver finds them."""
    if importlib.util.find_spec("kubernetes") is None:
        raise DeviceError(
            "TensorFlow asks Kubernetes by the package 'kubernetes', which is not installed: pip "
            "install kubernetes; or give host:port of each worker, by a StatefulSet's names"
        )
    import tensorflow as tf

    if not selector:
        raise DeviceError("which pods? write kubernetes:LABEL=VALUE, such as kubernetes:app=worker")
    resolver = tf.distribute.cluster_resolver.KubernetesClusterResolver(
        job_to_label_mapping={"worker": [selector]}, tf_server_port=PORT
    )
    try:
        return _addresses(resolver.cluster_spec().as_dict().get("worker", []))
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"Kubernetes does not say where workers are: {error}") from error


def mpi_rank() -> tuple[int, int] | None:
    """Returns rank and number of the processes that `mpirun` has started; None outside of it."""
    for names in _RANKS:
        rank, size = (os.environ.get(name, "") for name in names)
        if rank.isdecimal() and size.isdecimal() and int(rank) < int(size):
            return int(rank), int(size)
    return None


def announce(folder: str, address: str) -> str:
    """Writes the address of a worker of `mpirun` into a folder; returns the path of the file.

    Raises:
        DeviceError: `mpirun` has not started this process, or the file cannot be written.
    """
    if (found := mpi_rank()) is None:
        variables = " and ".join(" or ".join(names) for names in zip(*_RANKS, strict=True))
        raise DeviceError(
            f"--announce={folder!r}: mpirun has not started this worker, since neither {variables} "
            "is set; start it by mpirun, or give host:port of each worker to --cluster"
        )
    path = os.path.join(folder, "worker-{}-of-{}".format(*found))
    try:
        os.makedirs(folder, exist_ok=True)
        # A client must not read half of it.
        with open(f"{path}.new", "w", encoding="utf-8") as file:
            file.write(address)
        os.replace(file.name, path)
    except OSError as error:
        raise DeviceError(f"--announce={folder!r}: {error.strerror}; give a shared one") from error
    return path


def _of_mpi(folder: str) -> tuple[str, ...]:
    """Returns the workers that announce themselves in a folder, in the order of their ranks."""
    # mpirun tells a process its rank, but not where the others are.
    if not folder:
        raise DeviceError(
            "where do workers announce themselves? write mpi:FOLDER, a shared folder that is new "
            "for each job, as `pipemesh worker --announce=FOLDER` under mpirun"
        )
    own, limit = mpi_rank(), time.monotonic() + _MPI_SECONDS
    if own == (0, 1):
        raise DeviceError(
            f"mpi:{folder}: mpirun has started this client alone; start its workers in the same "
            "job, as in `mpirun -n 1 pipemesh train ... : -n 4 pipemesh worker ...`"
        )
    while True:
        names = sorted(os.listdir(folder)) if os.path.isdir(folder) else []
        found = {int(m[1]): m for name in names if (m := _ANNOUNCED.fullmatch(name))}
        sizes = {int(match[2]) for match in found.values()} | ({own[1]} if own else set())
        if len(sizes) > 1:
            raise DeviceError(
                f"mpi:{folder} has workers of several jobs, of {' and '.join(map(str, sizes))} "
                "processes; give each job a folder of its own"
            )
        ranks = {*range(max(sizes, default=0))} - ({own[0]} if own else set())
        if ranks and ranks <= found.keys():
            break
        if time.monotonic() >= limit:
            missing = sorted(ranks - found.keys())
            raise DeviceError(
                f"mpi:{folder} has no worker {f'of rank {missing[0]}' if missing else 'at all'} "
                f"after {_MPI_SECONDS:.0f} s; start all by mpirun with --announce={folder}"
            )
        time.sleep(_MPI_PAUSE)
    paths = [os.path.join(folder, found[rank][0]) for rank in sorted(ranks)]
    if own:
        # A client in the same job ends its workers, for which mpirun waits.
        atexit.register(lambda: [withdraw(path) for path in paths])
    addresses: list[str] = []
    for path in paths:
        with open(path, encoding="utf-8") as file:
            addresses.append(file.read())
    return tuple(addresses)


def withdraw(path: str) -> None:
    """Removes the file of `announce`, after which its worker ends."""
    with contextlib.suppress(OSError):
        os.remove(path)


def _addresses(resolved: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(address).removeprefix("grpc://") for address in resolved)
