"""Flags of devices and workers; TensorFlow with these; `pipemesh launch` and `worker`."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable

from pipemesh.commands import process
from pipemesh.commands.flags import (
    CONFIG,
    FILES,
    FLAGS,
    WORKERS,
    Command,
    Flag,
    FlagError,
    check_number,
    grouped,
    parse,
)
from pipemesh.errors import DeviceError
from pipemesh.hosts import Cluster
from pipemesh.hosts.cluster import LOOPBACK, PORT
from pipemesh.mesh import Mesh
from pipemesh.plan import Plan
from pipemesh.plan.search import fewer

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
        "worker`; or tf_config, slurm, kubernetes:LABEL=VALUE or mpi:FOLDER. Default: those in "
        "TF_CONFIG, if it is set; none uses this machine all the same.",
    ),
    Flag(
        "spares",
        help="Workers that take the place of a lost one, host:port as --cluster.",
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
        help=f"Seconds to wait for missing workers; default: {_WAIT:.0f}, with --elastic "
        f"{_ELASTIC_WAIT:.0f}.",
    ),
    Flag(
        "elastic",
        bool,
        False,
        help="If workers do not return within --worker_wait, continue on the remaining ones with a "
        "smaller mesh; use returning workers at the next restart.",
    ),
    Flag(
        "step_limit",
        float,
        help="Report which worker is blocked when a step takes longer than this many seconds; "
        "after twice as long a training restarts from its last checkpoint, and other commands end. "
        "Default: 20 times the median of the last steps, at least 60.",
    ),
)
# They are of a call: what was trained on some workers goes on on others, or on none.
NAMES = tuple(flag.name for flag in HOST_FLAGS)
# Whether the program goes on by itself from what it has saved; set by those that do.
_again = False


def device_flags(
    mesh_shape: str | None, layout: str | None, about_mesh: str, about_layout: str
) -> tuple[Flag, ...]:
    """Returns the flags of devices, with these defaults and help."""
    return (
        Flag("mesh_shape", default=mesh_shape, help=about_mesh),
        Flag("layout", default=layout, help=about_layout),
        Flag(
            "device_type",
            choices=["CPU", "GPU"],
            help="Type of devices; default: GPU if this machine has enough of them for the mesh, "
            "else CPU; of workers: CPU.",
        ),
        Flag(
            CONFIG,
            value="FILE",
            help="A TOML file of flags, such as `steps = 300`; the command line has precedence.",
            group=FILES,
        ),
    )


def device_type(num_devices: int) -> str:
    """Returns `CPU` or `GPU`; it loads TensorFlow to find GPUs. The number is 0 if not known."""
    if FLAGS.device_type is None:
        import tensorflow as tf

        cluster = FLAGS.value("cluster", "none")
        has_workers = cluster not in (None, "none")
        if cluster is None:
            # Connecting to the workers reports an invalid value.
            with contextlib.suppress(DeviceError):
                has_workers = Cluster.from_environment() is not None
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
    """Starts TensorFlow with the devices of a mesh."""
    import tensorflow as tf

    from pipemesh.backend.devices import start_cpu_devices

    wanted = mesh.num_devices
    given = f"--mesh_shape={str(mesh)!r} needs {wanted} {device_type}s, but"
    if device_type == "GPU":
        available = len(tf.config.list_physical_devices("GPU"))
        if wanted > available:
            raise FlagError(f"{given} {available} exist; use a smaller mesh or --device_type=CPU")
        try:
            # It starts TensorFlow.
            tf.config.list_logical_devices()
        except tf.errors.InternalError as error:
            raise FlagError(
                f"--device_type=GPU: a GPU does not start ({error.message}); end other programs "
                "that use it, which nvidia-smi lists, or use --device_type=CPU"
            ) from error
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
    """Starts TensorFlow with the devices of a mesh, or with workers, for a program that trains."""
    from absl import logging

    from pipemesh.backend.devices import prepare_graphs_quickly

    accept_lingvo_flags()
    logging.use_absl_handler()
    logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    if not connect():
        start_devices(mesh, device_type)


def connect() -> bool:
    """Connects to workers before TensorFlow's first operation; returns whether there are any."""
    if FLAGS.value("cluster", "none") == "none":
        return _no_workers()
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
        return _no_workers()
    for name in ("worker_answer", "worker_wait", "step_limit"):
        if (value := FLAGS.value(name)) is not None:
            check_number(name, value)
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


def _no_workers() -> bool:
    """Returns False, after a check that no worker is to read data."""
    if FLAGS.value("read_data") == "workers":
        raise FlagError(
            "--read_data=workers is for workers; give their addresses by --cluster, or leave it out"
        )
    return False


def fitting(plan: Plan, device_type: str, check: Callable[[Plan], object]) -> Plan:
    """Returns the plan, or with --elastic one for the available workers, and prints the changes."""
    if not FLAGS.value("elastic"):
        return plan
    from pipemesh.backend.cluster import worker_devices

    there = worker_devices(device_type)
    count = sum(map(len, there))
    found = fewer(plan, count, check)
    if found != plan:
        changes = ", ".join(f"{name}={new}" for name, (_, new) in plan.changes(found).items())
        print(
            f"elastic: {len(there)} workers with {count} devices are there, and mesh={plan.mesh} "
            f"has {plan.mesh.num_devices}: this time {changes}"
        )
    return found


_ABOUT_LAUNCH = """\
Starts workers on this machine, and a command that drives them.

    pipemesh launch --processes=4 -- pipemesh train --mesh_shape=layers:4 --model=...
    pipemesh launch --processes=2 -- python -m models.one_billion_word.train --mesh_shape=layers:2

The command finds the workers by TF_CONFIG. Its output and its exit code are passed on. Workers end
with the command, or with the launcher, however these end; a worker that ends before is restarted.
"""
LAUNCH = Command(
    "pipemesh launch",
    _ABOUT_LAUNCH,
    (
        Flag("command", argument="...", help="The command and its arguments."),
        Flag(
            "processes",
            int,
            required=True,
            value="N",
            least=1,
            help="Number of workers to start.",
        ),
        Flag("spares", int, 0, value="N", least=0, help="Number of spares that replace lost ones."),
        Flag(
            "cpu_devices", int, 1, value="N", least=1, help="Number of CPU devices of each worker."
        ),
    ),
)


def launch(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, LAUNCH)
    from pipemesh.hosts import processes

    return processes.launch(flags.command or [], flags.processes, flags.spares, flags.cpu_devices)


_ABOUT_WORKER = """\
Offers the devices of this machine to a client, with a server of TensorFlow.

    pipemesh worker --port=2222 --cpu_devices=2
    pipemesh train --cluster=127.0.0.1:2222 --mesh_shape=layers:2 --model=...

The server executes whatever a client sends, without authentication or encryption. So by default
only this machine can reach it. --listen names an address of a private network, or of a tunnel, by
which others can.
"""
WORKER = Command(
    "pipemesh worker",
    _ABOUT_WORKER,
    (
        Flag("port", int, PORT, help=f"Port to listen on; 0 for a free one (default: {PORT})."),
        Flag(
            "listen",
            default=LOOPBACK,
            value="ADDRESS",
            help="Address of this machine by which others may reach the worker, 0.0.0.0 for all; "
            f"there is no authentication, so use a private network (default: {LOOPBACK}).",
        ),
        Flag("cpu_devices", int, 1, value="N", least=1, help="Number of CPU devices to offer."),
        Flag(
            "announce",
            value="FOLDER",
            help="Folder in which a worker that mpirun starts writes its address, for "
            "--cluster=mpi:FOLDER; shared by all hosts, and new for each job.",
        ),
        # Of a parent that ends its workers with itself.
        Flag("parent_fd", int, hidden=True),
    ),
)


def worker(argv: list[str]) -> int:
    """Runs the command; returns its exit code."""
    flags = parse(argv, WORKER)
    # Datasets of clients call functions of the project.
    process.look_here()
    # It loads TensorFlow, which announces itself.
    process.import_quietly()
    from pipemesh.hosts.worker import run_worker

    return run_worker(flags.port, flags.listen, flags.cpu_devices, flags.parent_fd, flags.announce)
