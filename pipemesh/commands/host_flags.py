"""Flags of devices and workers, and the start of TensorFlow with them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING

from pipemesh.commands.flags import (
    CONFIG,
    FILES,
    FLAGS,
    WORKERS,
    Flag,
    FlagError,
    check_number,
    grouped,
)
from pipemesh.errors import DeviceError, PlanError
from pipemesh.hosts import Cluster
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.plan.fewer import fewer

if TYPE_CHECKING:
    from pipemesh.hosts.peers import Joined

# They are of a call: what was trained on some workers goes on on others, or on none.
NAMES = (
    *("cluster", "spares", "client_address", "worker_answer", "worker_wait", "elastic"),
    *("step_limit", "process", "listen"),
)
# Each logical device has threads of its own; a larger mesh is probably a typing error.
_MOST_CPU_DEVICES = 64
# Seconds to wait for workers that are not there: until it is an error, and until those that are
# there go on without them.
_WAIT, _ELASTIC_WAIT = 600.0, 30.0
HOST_FLAGS = grouped(
    WORKERS,
    Flag(
        "cluster",
        help="Workers whose devices to use, host:port with commas between, each a `pipemesh "
        "worker`; or tf_config, slurm, or kubernetes:LABEL=VALUE. Default: those in TF_CONFIG, if "
        "it is set; none uses this machine all the same.",
    ),
    Flag(
        "spares",
        help="Workers that take the place of one that is lost, host:port as --cluster. With "
        "several processes: spare processes that run this command, too, numbered after the "
        "others; they replace one that is missing for --worker_wait.",
    ),
    Flag(
        "client_address",
        help="host:port of this program, as workers reach it; default: its address towards the "
        "first.",
    ),
    Flag(
        "worker_answer",
        float,
        5.0,
        help="Timeout in seconds of a worker's answer; it is asked twice.",
    ),
    Flag(
        "worker_wait",
        float,
        help=f"Seconds to wait for missing workers; default: {_WAIT:.0f}, with --elastic, or "
        f"until a spare takes the place of one of several processes, {_ELASTIC_WAIT:.0f}.",
    ),
    Flag(
        "elastic",
        bool,
        False,
        help="If workers, or processes, do not return within --worker_wait, continue on the "
        "remaining ones with a smaller mesh; use returning ones at the next restart.",
    ),
    Flag(
        "step_limit",
        float,
        help="Report which worker is blocked when a step takes longer than this many seconds; "
        "restart from the last checkpoint after twice as long. Default: 20 times the median of "
        "the last steps, at least 60.",
    ),
    Flag(
        "process",
        int,
        help="Index of this process in --cluster (spares are numbered after it). Only with "
        "--lowering=simd, where every process runs this command. Default: from TF_CONFIG.",
    ),
    Flag(
        "listen",
        help="With --process, the address by which other machines may reach this process, 0.0.0.0 "
        "for all; there is no authentication, so use a private network. Default: none.",
    ),
)
# Whether the program goes on by itself from what it has saved; set by those that do.
_again = False
# Whether TensorFlow was started as one of several processes.
_together = False
# Of several processes that go on without one that is lost, those that do.
_joined: Joined | None = None


def device_flags(
    mesh_shape: str | None, layout: str | None, about_mesh: str, about_layout: str
) -> tuple[Flag, ...]:
    """Returns the flags of devices.

    Args:
        mesh_shape: the default of `--mesh_shape`.
        layout: the default of `--layout`.
        about_mesh: the help of `--mesh_shape`.
        about_layout: the help of `--layout`.
    """
    return (
        Flag("mesh_shape", default=mesh_shape, help=about_mesh),
        Flag("layout", default=layout, help=about_layout),
        Flag(
            "device_type",
            choices=["CPU", "GPU"],
            help="Type of devices; default: GPU if this machine has enough of them for the mesh "
            "and --cluster names no workers, else CPU.",
        ),
        Flag(
            CONFIG,
            value="FILE",
            help="A TOML file of flags, such as `steps = 300`; the command line has precedence.",
            group=FILES,
        ),
    )


def device_type(num_devices: int) -> str:
    """Returns `CPU` or `GPU`: the flag, or its default. Loads TensorFlow to find GPUs.

    Args:
        num_devices: devices of the mesh; 0 if they are not known.
    """
    if FLAGS.device_type is None:
        import tensorflow as tf

        cluster = FLAGS.value("cluster", "none")
        has_workers = cluster not in (None, "none")
        if cluster is None:
            # What is wrong with it is said when workers are connected.
            with contextlib.suppress(DeviceError):
                has_workers = Cluster.from_environment(together=True) is not None
        gpus = 0 if has_workers else len(tf.config.list_physical_devices("GPU"))
        FLAGS.set("device_type", "GPU" if gpus and gpus >= num_devices else "CPU", given=False)
        if 0 < gpus < num_devices:
            print(
                f"{gpus} GPU{'s' * (gpus > 1)} of this machine idle: the mesh has {num_devices} "
                "devices, which are CPU devices; use a smaller mesh with --device_type=GPU",
                file=sys.stderr,
            )
    return str(FLAGS.value("device_type"))


def start_devices(mesh: Mesh, device_type: str) -> None:
    """Starts TensorFlow with the devices of a mesh.

    Raises:
        FlagError: there are too few.
    """
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    wanted = mesh.num_devices
    given = f"--mesh_shape={str(mesh)!r} needs {wanted} {device_type}s, but"
    if device_type == "GPU":
        available = len(tf.config.list_physical_devices("GPU"))
        if wanted > available:
            raise FlagError(f"{given} {available} exist; use a smaller mesh or --device_type=CPU")
    elif wanted > _MOST_CPU_DEVICES:
        raise FlagError(
            f"{given} at most {_MOST_CPU_DEVICES} logical ones are made; use a smaller mesh"
        )
    else:
        start_cpu_devices(wanted)


def go_on_by_itself() -> None:
    """Lets this program begin again when a worker is lost: it goes on from what it has saved."""
    global _again
    _again = True


def accept_lingvo_flags() -> None:
    """Lets lingvo read its own flags, which have their defaults: absl parses no command line."""
    from absl import flags

    flags.FLAGS.mark_as_parsed()


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
    accept_lingvo_flags()
    logging.use_absl_handler()
    logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    if (found := processes()) is not None:
        _start_together(mesh, device_type, *found)
    elif not connect():
        start_devices(mesh, device_type)


def processes() -> tuple[Cluster, int] | None:
    """Returns the processes of this program and the index of this one; None if it is alone.

    Raises:
        FlagError: a flag is malformed.
    """
    from pipemesh.hosts.cluster import TF_CONFIG, own_process

    if FLAGS.value("cluster", "none") == "none":
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
    """Returns a function that says how many processes continue, and under which plan."""

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
    """Returns the fewest processes that share the devices evenly; 0 if there are none.

    Example:
        >>> _dealt(4, 3, 2), _dealt(3, 2, 2)
        (2, 0)
    """
    counts = range(1, most + 1)
    return next((n for n in counts if devices % n == 0 and devices // n <= each), 0)


def has_joined() -> bool:
    """Returns whether processes have agreed on which of them take part."""
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
    if FLAGS.value("lowering", "simd") != "simd":
        raise FlagError(
            f"{len(cluster.workers)} processes run this command, but each of them computes its "
            "part by --lowering=simd alone; add that, or run this once, with workers"
        )
    for name in ("find_learning_rate", "histogram_every", "profile_steps"):
        if FLAGS.value(name):
            raise FlagError(f"--{name} is not supported with several processes; leave it out")
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
        if (value := FLAGS.value(name)) is not None:
            check_number(name, value)


def connect() -> bool:
    """Connects this program to its workers, before TensorFlow's first operation.

    Returns:
        Whether there are any.

    Raises:
        FlagError: a flag is malformed, or workers do not go with another one.
        DeviceError: a worker is not there.
    """
    if FLAGS.value("cluster", "none") == "none":
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
        if found is None and FLAGS.is_given(name) and FLAGS.value(name):
            raise FlagError(f"--{name} is for workers; give their addresses by --cluster")
    if found is None:
        return False
    _check_numbers()
    if FLAGS.elastic and not _again:
        raise FlagError(
            "--elastic is for a training, which goes on from its checkpoints; give a --mesh_shape "
            "for the workers that are there"
        )
    if FLAGS.value("trace_schedule"):
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
    """Returns the plan, or with --elastic one for the available workers, and prints the changes.

    Args:
        plan: what is asked for.
        device_type: `CPU` or `GPU`.
        check: raises a `PipemeshError` for a plan that the model cannot have.

    Raises:
        PlanError: no plan for so few devices goes with the rest of it.
    """
    if not FLAGS.value("elastic") or _joined is not None:
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
