"""The flags that say which workers a program drives."""

from __future__ import annotations

from collections.abc import Callable

from absl import flags

from pipemesh.errors import DeviceError
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
_REMOVED = (
    "Removed: several processes no longer run one command. Start `pipemesh worker` on each host, "
    "and run the command once, with the workers' addresses as --cluster."
)


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
        "Workers that take the place of a lost one, host:port as --cluster.",
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
        f"Seconds to wait for missing workers; default: {_WAIT:.0f}, with --elastic "
        f"{_ELASTIC_WAIT:.0f}.",
    )
    flags.DEFINE_boolean(
        "elastic",
        False,
        "If workers do not return within --worker_wait, continue on the remaining ones with a "
        "smaller mesh; use returning workers at the next restart.",
    )
    flags.DEFINE_float(
        "step_limit",
        None,
        "Report which worker is blocked when a step takes longer than this many seconds; restart "
        "from the last checkpoint after twice as long. Default: 20 times the median of the last "
        "steps, at least 60.",
    )
    flags.DEFINE_integer("process", None, _REMOVED)
    flags.DEFINE_string("listen", None, _REMOVED)


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

    logging.use_absl_handler()
    if not FLAGS["verbosity"].present:
        logging.set_verbosity(logging.ERROR)
    prepare_graphs_quickly()
    if not connect():
        start_devices(mesh, device_type)


def connect() -> bool:
    """Connects this program to its workers, before TensorFlow's first operation.

    Returns:
        Whether there are any.

    Raises:
        FlagError: a flag is malformed, or workers do not go with another one.
        DeviceError: a worker is not there.
    """
    if "cluster" not in FLAGS:
        return False
    for name in ("process", "listen"):
        if FLAGS[name].value is not None:
            raise FlagError(f"--{name}={FLAGS[name].value}: {_REMOVED}")
    if FLAGS.cluster == "none":
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
    for name in ("worker_answer", "worker_wait", "step_limit"):
        if (value := FLAGS[name].value) is not None:
            check_number(name, value)
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
    if "elastic" not in FLAGS or not FLAGS.elastic:
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
