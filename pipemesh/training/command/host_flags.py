"""The flags that say which workers a program drives."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

from pipemesh.errors import DeviceError, PlanError
from pipemesh.hosts import Cluster
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.plan.search import fewer
from pipemesh.training.command.flags import (
    WORKERS,
    FlagError,
    check_number,
    group,
    start_devices,
)

if TYPE_CHECKING:
    from pipemesh.hosts.peers import Joined

FLAGS = flags.FLAGS

# Flags that are defined here belong to the program that asks for them.
flags.disclaim_key_flags()

# They are of a call: what was trained on some workers goes on on others, or on none.
NAMES = (
    *("cluster", "spares", "client_address", "worker_answer", "worker_wait", "elastic"),
    *("step_limit", "process", "listen"),
)
# Seconds to wait for workers that are not there: until it is an error, and until those that are
# there go on without them.
_WAIT, _ELASTIC_WAIT = 600.0, 30.0
# Whether the program goes on by itself from what it has saved; set by those that do.
_again = False
# Whether TensorFlow was started as one of several processes.
_together = False
# Of several processes that go on without one that is lost, those that do.
_joined: Joined | None = None


@group(WORKERS)
def define() -> None:
    """Defines them."""
    flags.DEFINE_string(
        "cluster",
        None,
        "Workers whose devices to use, host:port with commas between, each a `pipemesh worker`; or "
        "tf_config, slurm, or kubernetes:LABEL=VALUE. Default: those in TF_CONFIG, if it is set; "
        "none uses this machine all the same.",
    )
    flags.DEFINE_string(
        "spares",
        None,
        "Workers that take the place of one that is lost, host:port as --cluster. Of several "
        "processes, those that run this command, too, numbered behind the others, and take the "
        "place of one that is not there for --worker_wait.",
    )
    flags.DEFINE_string(
        "client_address",
        None,
        "host:port of this program, as workers reach it; default: its address towards the first.",
    )
    flags.DEFINE_float(
        "worker_answer",
        5.0,
        "Seconds in which a worker must answer that it is there; it is asked twice.",
    )
    flags.DEFINE_float(
        "worker_wait",
        None,
        f"Seconds to wait for workers that are not there; default: {_WAIT:.0f}, with --elastic, or "
        f"until a spare takes the place of one of several processes, {_ELASTIC_WAIT:.0f}.",
    )
    flags.DEFINE_boolean(
        "elastic",
        False,
        "Whether a training goes on with those workers, or processes, that are there, under a "
        "smaller mesh, when others do not come within --worker_wait. Each time that it begins "
        "again it takes all that are there.",
    )
    flags.DEFINE_float(
        "step_limit",
        None,
        "Seconds after which it is said of a step on workers that does not end who waits for whom; "
        "after twice as many it is begun again from the last checkpoint. Default: 20 times the "
        "median of the last steps, at least 60.",
    )
    flags.DEFINE_integer(
        "process",
        None,
        "Which of the addresses of --cluster this process is, those of --spares behind them: all "
        "run this command and compute together, by --lowering=simd. Default: what TF_CONFIG says.",
    )
    flags.DEFINE_string(
        "listen",
        None,
        "With --process, the address by which other machines may reach this process, 0.0.0.0 for "
        "all; nobody is asked for a password, so give one of a private network. Default: none.",
    )


def go_on_by_itself() -> None:
    """Lets this program begin again when a worker is lost: it goes on from what it has saved."""
    global _again
    _again = True


def start_tensorflow(mesh: Mesh, device_type: str) -> None:
    """Starts TensorFlow with the devices of a mesh, or with workers, for a program that trains.

    Raises:
        FlagError: there are not as many.
        DeviceError: a worker is not there.
    """
    from absl import logging

    from pipemesh.backend.devices import prepare_graphs_quickly

    if _together:
        return
    logging.use_absl_handler()
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    if (found := processes()) is not None:
        _start_together(mesh, device_type, *found)
    elif not connect():
        start_devices(mesh, device_type)


def processes() -> tuple[Cluster, int] | None:
    """The processes that run this program, and the number of this one; None if it is alone.

    Raises:
        FlagError: a flag is malformed.
    """
    from pipemesh.hosts.cluster import TF_CONFIG, own_process

    if "process" not in FLAGS or FLAGS.cluster == "none":
        return None
    index, by_variable = FLAGS.process, FLAGS.cluster in (None, TF_CONFIG)
    if index is None and by_variable:
        index = own_process()
    if index is None:
        if FLAGS.listen is not None:
            raise FlagError("--listen is for one of several processes; say which by --process")
        return None
    if _joined is not None:
        return _joined.roster.addresses(), _joined.number
    try:
        found = Cluster.from_environment(together=True) if by_variable else None
        if found is None:
            found = Cluster.from_text(FLAGS.cluster or "", FLAGS.spares or "")
        elif FLAGS.spares:
            found = Cluster(found.workers, Cluster.from_text(FLAGS.spares).workers)
    except DeviceError as error:
        raise FlagError(f"--process={index}: {error}") from error
    count = len(found.workers) + len(found.spares)
    if not 0 <= index < count:
        raise FlagError(
            f"--process={index}: there are {count} addresses, whose numbers begin with 0"
        )
    if FLAGS.client_address:
        raise FlagError("--client_address is for one process that drives workers; leave it out")
    for name, is_given in (("spares", found.spares), ("elastic", FLAGS.elastic)):
        if is_given and not _again:
            raise FlagError(
                f"--{name} is for a training, which goes on from its checkpoints; leave it out, "
                "and give the processes that are there"
            )
    return found, index


def agree(plan: Plan, folder: str, check: Callable[[Plan], object]) -> Plan:
    """Agrees with other processes on which of them take part, if some may be done without.

    They are told apart by their numbers from then on; see `processes`. Ends this program if the
    training has ended without it. To be called before TensorFlow starts.

    Args:
        plan: what is asked for.
        folder: the log directory.
        check: raises a `PipemeshError` for a plan that the model cannot have.

    Returns:
        The plan for those that take part.

    Raises:
        FlagError: a flag is malformed, or the plan is not for several processes.
        DeviceError: others are missing for too long.
        PlanError: no plan for so few devices goes with the rest of it.
    """
    global _joined
    found = processes()
    if found is None or _joined is not None:
        return plan
    # They load gRPC.
    from pipemesh.hosts.peers import check_listens, join
    from pipemesh.hosts.rollcall import Wish

    cluster, index = found
    check_listens([*cluster.workers, *cluster.spares][index], FLAGS.listen)
    if not (FLAGS.elastic or cluster.spares):
        return plan
    each = _check_together(plan.mesh, cluster)
    joined = join(
        Wish(
            cluster,
            index,
            answer=FLAGS.worker_answer,
            patience=FLAGS.worker_wait or _ELASTIC_WAIT,
            limit=FLAGS.worker_wait or _WAIT,
            fit=_fitting(plan, each, check) if FLAGS.elastic else None,
            listen=FLAGS.listen,
        ),
        folder,
    )
    if joined is None:
        raise SystemExit(0)
    _joined = joined
    if not joined.roster.plan:
        return plan
    other = Plan.from_text(joined.roster.plan)
    if not joined.number:
        members, number = len(joined.roster.members), len(cluster.workers)
        _tell_changes(plan, other, f"{members} of {number} processes take part")
    return other


def _fitting(
    plan: Plan, each: int, check: Callable[[Plan], object]
) -> Callable[[int], tuple[int, str]]:
    """How many of so many processes, with so many devices each, go on, and by which plan."""

    def fit(there: int) -> tuple[int, str]:
        def checked(other: Plan) -> None:
            if not _dealt(other.mesh.num_devices, there, each):
                raise PlanError(
                    f"its {other.mesh.num_devices} devices cannot be dealt out evenly to "
                    f"{there} processes or fewer that have {each} each"
                )
            check(other)

        found = fewer(plan, there * each, checked)
        return _dealt(found.mesh.num_devices, there, each), str(found)

    return fit


def _dealt(devices: int, most: int, each: int) -> int:
    """The fewest processes that have so many devices, all as many; 0 if there are none.

    Example:
        >>> _dealt(4, 3, 2), _dealt(3, 2, 2)
        (2, 0)
    """
    counts = range(1, most + 1)
    return next((n for n in counts if devices % n == 0 and devices // n <= each), 0)


def has_joined() -> bool:
    """Whether processes have agreed on which of them take part."""
    return _joined is not None


def say_ended() -> None:
    """Tells processes that wait to take part, if there are any, that the training has ended."""
    if _joined is not None and not _joined.number:
        _joined.say_ended()


def _start_together(mesh: Mesh, device_type: str, cluster: Cluster, index: int) -> None:
    """Starts TensorFlow as one of several processes, with its part of a mesh."""
    global _together
    from pipemesh.hosts import peers, silence

    each = _check_together(mesh, cluster)
    if device_type == "CPU":
        from pipemesh.backend.devices import start_cpu_devices

        start_cpu_devices(each)
    peers.connect(
        cluster,
        index,
        kind=device_type,
        listen=FLAGS.listen,
        answer=FLAGS.worker_answer,
        wait=FLAGS.worker_wait or _WAIT,
        again=_again,
        step_limit=FLAGS.step_limit,
        joined=_joined,
    )
    _together = True
    if index:
        silence.be_silent()


def _check_together(mesh: Mesh, cluster: Cluster) -> int:
    """Checks what several processes need; returns how many devices each of them has."""
    if "lowering" in FLAGS and FLAGS.lowering != "simd":
        raise FlagError(
            f"{len(cluster.workers)} processes run this command, but each of them computes its "
            "part by --lowering=simd alone; add that, or run this once, with workers"
        )
    for name in ("find_learning_rate", "histogram_every", "profile_steps"):
        if name in FLAGS and FLAGS[name].value:
            raise FlagError(f"--{name} is not to be had of several processes; leave it out")
    _check_numbers()
    each, more = divmod(mesh.num_devices, len(cluster.workers))
    if more or not each:
        raise FlagError(
            f"--mesh_shape={str(mesh)!r} has {mesh.num_devices} processors, which cannot be dealt "
            f"out evenly to {len(cluster.workers)} processes; use a mesh of a multiple of them"
        )
    return each


def _check_numbers() -> None:
    for name in ("worker_answer", "worker_wait", "step_limit"):
        if (value := FLAGS[name].value) is not None:
            check_number(name, value)


def connect() -> bool:
    """Connects this program to its workers, before TensorFlow's first operation.

    Returns:
        Whether there are any.

    Raises:
        FlagError: a flag is malformed, or workers do not go with another one.
        DeviceError: a worker is not there.
    """
    if "cluster" not in FLAGS or FLAGS.cluster == "none":
        return False
    try:
        if FLAGS.cluster is None:
            found = Cluster.from_environment()
            if found and FLAGS.spares:
                found = Cluster.from_text("tf_config", FLAGS.spares)
        else:
            found = Cluster.from_text(FLAGS.cluster, FLAGS.spares or "")
    except DeviceError as error:
        flag = "--cluster: " if FLAGS.cluster is None else f"--cluster={FLAGS.cluster!r}: "
        raise FlagError(f"{flag}{error}") from error
    for name in ("spares", "client_address", "elastic", "step_limit"):
        if found is None and FLAGS[name].present and FLAGS[name].value:
            raise FlagError(f"--{name} is for workers; give their addresses by --cluster")
    if found is None:
        return False
    _check_numbers()
    if FLAGS.elastic and not _again:
        raise FlagError(
            "--elastic is for a training, which goes on from its checkpoints; give a --mesh_shape "
            "for the workers that are there"
        )
    if "trace_schedule" in FLAGS and FLAGS.trace_schedule:
        raise FlagError(
            "--trace_schedule takes times in this process, where workers compute nothing; leave it "
            "out, or --cluster=none"
        )
    # The room loads gRPC.
    from pipemesh.hosts.client import connect as connect_to

    connect_to(
        found,
        address=FLAGS.client_address,
        answer=FLAGS.worker_answer,
        wait=_WAIT if FLAGS.elastic or FLAGS.worker_wait is None else FLAGS.worker_wait,
        again=_again,
        fewer=(FLAGS.worker_wait or _ELASTIC_WAIT) if FLAGS.elastic else None,
        step_limit=FLAGS.step_limit,
    )
    return True


def fitting(plan: Plan, device_type: str, check: Callable[[Plan], object]) -> Plan:
    """A plan for the workers that are there, where a training is elastic; or the plan itself.

    Says so if it is another one.

    Args:
        plan: what is asked for.
        device_type: `CPU` or `GPU`.
        check: raises a `PipemeshError` for a plan that the model cannot have.

    Raises:
        PlanError: no plan for so few devices goes with the rest of it.
    """
    if "elastic" not in FLAGS or not FLAGS.elastic or _joined is not None:
        return plan
    from pipemesh.backend.cluster import worker_devices

    there = worker_devices(device_type)
    count = sum(map(len, there))
    found = fewer(plan, count, check)
    if found != plan:
        _tell_changes(plan, found, f"{len(there)} workers with {count} devices are there")
    return found


def _tell_changes(plan: Plan, found: Plan, who: str) -> None:
    changes = ", ".join(f"{name}={new}" for name, (_, new) in plan.changes(found).items())
    print(f"elastic: {who}, and mesh={plan.mesh} has {plan.mesh.num_devices}: this time {changes}")
