"""Which workers there are: from a command line, `TF_CONFIG`, Slurm or Kubernetes."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

from pipemesh.addresses import check_addresses
from pipemesh.errors import DeviceError

TF_CONFIG, SLURM, KUBERNETES = "tf_config", "slurm", "kubernetes"
# The port that workers have where nobody says: as TensorFlow's resolvers have it.
PORT = 8888
# Addresses that this machine alone reaches, and those that whoever can may reach.
LOOPBACK, EVERYWHERE = "127.0.0.1", ("0.0.0.0", "::")
_WORKER, _SPARE = "worker", "spare"
# So much of a malformed text is shown.
_SHOWN = 200
# Of Slurm, on a node.
_MOST_TASKS = 1024


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Addresses of workers.

    Attributes:
        workers: `host:port` of each, in their order.
        spares: of those that take the place of one that is lost.
    """

    workers: tuple[str, ...]
    spares: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.workers:
            raise DeviceError("a cluster has no workers; give host:port of one or more")
        check_addresses([*self.workers, *self.spares])

    @classmethod
    def from_text(cls, text: str, spares: str = "") -> Cluster:
        """The workers that a command line names.

        Args:
            text: addresses with commas between, or who knows them: `tf_config`, `slurm` or
                `kubernetes:LABEL=VALUE`.
            spares: addresses with commas between.

        Raises:
            DeviceError: there is none, or one is malformed.

        Example:
            >>> Cluster.from_text("a:1,a")
            Traceback (most recent call last):
            pipemesh.errors.DeviceError: address 'a' is not host:port; write for example 'a:2222'
        """
        kind, _, selector = text.partition(":")
        extra = _listed(spares)
        if text == TF_CONFIG:
            found = cls.from_environment()
            if found is None:
                raise DeviceError(
                    "TF_CONFIG is not set, or has no cluster with a job 'worker'; give host:port "
                    "of each worker"
                )
            return cls(found.workers, extra or found.spares)
        if text == SLURM:
            return cls(_of_slurm(), extra)
        if kind == KUBERNETES:
            return cls(_of_kubernetes(selector), extra)
        return cls(_listed(text), extra)

    @classmethod
    def from_environment(
        cls, environment: Mapping[str, str] | None = None, together: bool = False
    ) -> Cluster | None:
        """The workers that the variable `TF_CONFIG` names; None if it names none.

        Its job `worker` is the workers, a job `spare` those that may take their places.

        Args:
            environment: by default that of this process.
            together: whether this process may be one of them, or a spare: all run one program.

        Raises:
            DeviceError: it is no JSON, or it says that this process is a worker itself.

        Example:
            >>> Cluster.from_environment({"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'})
            Cluster(workers=('a:1',), spares=())
        """
        environment = os.environ if environment is None else environment
        text = environment.get("TF_CONFIG", "")
        if not text.strip():
            return None
        jobs, own, _ = _read(text)
        if not jobs[_WORKER]:
            return None
        if own in (_WORKER, _SPARE) and not together:
            raise DeviceError(
                f"TF_CONFIG says that this process is a {own} itself; run `pipemesh worker` there, "
                "and this command once, with a task of another type or none. (In every process the "
                "same program computes its part under --lowering=simd alone.)"
            )
        try:
            return cls(*map(tuple, jobs.values()))
        except DeviceError as error:
            raise DeviceError(f"TF_CONFIG: {error}") from error

    def to_environment(self, process: int | None = None) -> str:
        """The text of `TF_CONFIG` for a process that drives these workers, or is one of them.

        Args:
            process: the number of the one that runs the same program as all others, spares behind
                the workers; None for one that drives them.
        """
        jobs = {_WORKER: list(self.workers)}
        if self.spares:
            jobs[_SPARE] = list(self.spares)
        kind, index, count = "client", process or 0, len(self.workers)
        if process is not None:
            kind, index = (_WORKER, index) if index < count else (_SPARE, index - count)
        return json.dumps({"cluster": jobs, "task": {"type": kind, "index": index}})


def own_process(environment: Mapping[str, str] | None = None) -> int | None:
    """The number of this process among those that `TF_CONFIG` names; None if it is none of them.

    Spares are numbered behind the workers.

    Example:
        >>> own_process({"TF_CONFIG": '{"task": {"type": "worker", "index": 3}}'})
        3
    """
    environment = os.environ if environment is None else environment
    try:
        jobs, kind, index = _read(environment.get("TF_CONFIG", ""))
    except DeviceError:
        # `Cluster.from_environment` says so.
        return None
    if kind not in (_WORKER, _SPARE):
        return None
    return index + (len(jobs[_WORKER]) if kind == _SPARE else 0)


def _read(text: str) -> tuple[dict[str, list[Any]], str, int]:
    """Parses `TF_CONFIG`.

    Returns:
        The addresses of workers and of spares, which are not checked yet, and type and index of
        this process.

    Raises:
        DeviceError: it is malformed.
    """
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
        return jobs, str(kind), int(str(index)) if kind in (_WORKER, _SPARE) else 0
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
    """The workers of a job of Slurm: one a task, as TensorFlow's resolver numbers them.

    The resolver knows steps; of a batch script, which is none, the job says the same.
    """
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
        # Which GPUs a worker has is Slurm's matter; a resolver lists no more tasks than GPUs.
        resolver = tf.distribute.cluster_resolver.SlurmClusterResolver(
            port_base=PORT, gpus_per_node=_MOST_TASKS, gpus_per_task=1, auto_set_gpu=False
        )
        found = resolver.cluster_spec().as_dict()["worker"]
    except (RuntimeError, ValueError) as error:
        raise DeviceError(f"Slurm does not say where workers are: {error}") from error
    return _addresses(found)


def _of_kubernetes(selector: str) -> tuple[str, ...]:
    """The pods with a label, as TensorFlow's resolver finds them."""
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


def _addresses(found: Sequence[Any]) -> tuple[str, ...]:
    return tuple(str(address).removeprefix("grpc://") for address in found)
