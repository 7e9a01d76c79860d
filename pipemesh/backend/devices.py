"""The devices and threads of a process, set up before TensorFlow starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

# Most of it is not public; TensorFlow's version is pinned.
from tensorflow.python.eager import context

from pipemesh.errors import DeviceError


def eager_context() -> context.Context:
    """The context of this process, made if there is none yet."""
    found = context.context()
    assert found is not None
    return found


# The job of a process that drives workers; TensorFlow's name of one that is alone, too.
CLIENT = "localhost"


def is_client() -> bool:
    """Whether this process drives workers; see `pipemesh.backend.cluster`."""
    definition = eager_context().get_server_def()
    return definition is not None and definition.job_name == CLIENT


MORE_DEVICES = (
    "Use a smaller mesh, or get more CPU devices: call "
    "pipemesh.backend.devices.start_cpu_devices(number) before TensorFlow starts"
)
"""What to do about too few devices."""


def start_cpu_devices(num_devices: int) -> None:
    """Splits this machine's CPU into logical devices that compute at the same time.

    Each operation has its own share of the cores, and there are threads enough for all devices:
    with fewer inter-op threads than devices, stages would wait for each other.

    Args:
        num_devices: at least 1.

    Raises:
        DeviceError: TensorFlow has started already, or `num_devices` is below 1.

    Example:
        >>> start_cpu_devices(0)
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: num_devices is 0; it must be at least 1
    """
    if num_devices < 1:
        raise DeviceError(f"num_devices is {num_devices}; it must be at least 1")
    cores = os.cpu_count() or 1
    try:
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * num_devices,
        )
        tf.config.threading.set_inter_op_parallelism_threads(max(num_devices, cores))
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // num_devices))
    except RuntimeError as error:
        found = len(tf.config.list_logical_devices("CPU"))
        raise DeviceError(
            f"{num_devices} CPU devices were asked for, but TensorFlow has already started with "
            f"{found}; set devices up before the first operation"
        ) from error


def prepare_graphs_quickly() -> None:
    """Lets TensorFlow's graph optimizer go over each graph once, where it would do so twice.

    The graphs of a pipeline hold little that a second look would find, and the optimizer is most
    of what TensorFlow does before a graph runs for the first time. On CPUs it leaves memory
    alone, too: in what order a pipeline computes is its schedule's; and the layout of images,
    which it would go through to change nothing. Sessions of TF1 have a configuration of their own.

    Raises:
        DeviceError: TensorFlow has started already.

    Example::

        prepare_graphs_quickly()
        start_cpu_devices(2)
    """
    started = eager_context()
    if started._initialized:
        raise DeviceError(
            "TensorFlow has already started; set its graph optimizer up before the first operation"
        )
    config = tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE
    if not tf.config.list_physical_devices("GPU"):
        rewrites.memory_optimization = rewrites.NO_MEM_OPT
        rewrites.layout_optimizer = rewrites.OFF
    started._config = config


def check_devices_exist(devices: Sequence[str]) -> tuple[str, ...]:
    """Finds devices by name: without them TensorFlow would put operations elsewhere, silently.

    Nothing is known of the devices of a TF1 session.

    Args:
        devices: names, whole ones such as `tensor.device` and lingvo's or short ones such as
            `CPU:1`.

    Returns:
        The name that TensorFlow lists for each, so that two spellings of one device are one;
        in TF1 the given names.

    Raises:
        DeviceError: a device does not exist, or what was given are no names.

    Example:
        >>> check_devices_exist(["CPU:0", "CPU:99"])
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: device 'CPU:99' does not exist; there are ...
    """
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise DeviceError(
            f"devices are {devices!r}; give a list of names, for example ['CPU:0', 'CPU:1']"
        )
    wanted = [_parse(device) for device in devices]
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return tuple(devices)
    known = [device.name for device in tf.config.list_logical_devices()]
    found: list[str] = []
    for device, spec in zip(devices, wanted, strict=True):
        fitting = [name for name in known if _fits(spec, tf.DeviceSpec.from_string(name))]
        if not fitting:
            raise DeviceError(
                f"device {device!r} does not exist; there are {', '.join(known)}. {MORE_DEVICES}"
            )
        # A name such as `GPU` leaves the choice to TensorFlow.
        found.append(device if spec.device_index is None else fitting[0])
    return tuple(found)


def processor_beside(device: str) -> str:
    """The CPU that does for a device what it cannot do itself; of a CPU that is itself.

    Example:
        >>> processor_beside("GPU:1"), processor_beside("CPU:3")
        ('/device:CPU:0', 'CPU:3')
    """
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _parse(device: object) -> tf.DeviceSpec:
    why: Exception | None = None
    if isinstance(device, str):
        try:
            return tf.DeviceSpec.from_string(device)
        except ValueError as error:
            why = error
    raise DeviceError(
        f"{device!r} is no name of a device; write for example 'CPU:0' or 'GPU:1'"
    ) from why


def _fits(wanted: tf.DeviceSpec, spec: tf.DeviceSpec) -> bool:
    if spec.job is None:
        # TensorFlow lists the devices of a process that is alone without its names for them.
        spec = spec.replace(job="localhost", replica=0, task=0)
    elif wanted.job is None and is_client():
        # Where there are workers, what names none is this process's own.
        return False
    parts = ("job", "replica", "task", "device_type", "device_index")
    return all(getattr(wanted, part) in (None, getattr(spec, part)) for part in parts)


def is_device(pinned: str, device: str) -> bool:
    """Whether an operation that is pinned so runs on a device.

    Args:
        pinned: as operations of a graph have it; with a name for nothing it may run anywhere.
        device: with type and number.

    Example:
        >>> is_device("/job:localhost/replica:0/task:0/device:CPU:1", "CPU:1")
        True
        >>> is_device("/device:CPU:1", "CPU:0"), is_device("", "CPU:0")
        (False, False)
    """
    found, wanted = tf.DeviceSpec.from_string(pinned), tf.DeviceSpec.from_string(device)
    return found.device_type is not None and agree(found, wanted)


def agree(one: tf.DeviceSpec, other: tf.DeviceSpec) -> bool:
    """Whether two names may be those of one device: no part that both have differs."""
    parts = ("job", "replica", "task", "device_type", "device_index")
    pairs = [(getattr(one, part), getattr(other, part)) for part in parts]
    return all(a == b or None in (a, b) for a, b in pairs)


def short_name(device: str) -> str:
    """A device as it is shown: by type and number, one of several tasks with that of its task.

    Example:
        >>> short_name("/job:localhost/replica:0/task:0/device:CPU:1")
        'CPU:1'
        >>> short_name("/job:worker/replica:0/task:0/device:CPU:1")
        '/task:0/CPU:1'
    """
    spec = tf.DeviceSpec.from_string(device)
    alone = not spec.task and spec.job in (None, "localhost")
    task = "" if alone else f"/task:{spec.task or 0}/"
    return f"{task}{spec.device_type}:{spec.device_index or 0}"


def device_of_scope() -> str:
    """The device of the scopes that code runs in eagerly, '' outside of all.

    Example:
        >>> with tf.device("CPU:0"):
        ...     device_of_scope()[-5:]
        'CPU:0'
    """
    return eager_context().device_name or ""


def check_threads(num_devices: int) -> None:
    """Warns if too few inter-op threads are set for so many devices to compute at one time.

    Nothing is known of the threads of a TF1 session, which are set when it is made.

    Args:
        num_devices: how many devices one step uses.
    """
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    if tf.compat.v1.executing_eagerly_outside_functions() and 0 < threads < num_devices:
        warnings.warn(
            f"{num_devices} devices share {threads} inter-op threads, so stages wait for each "
            "other; before TensorFlow starts, call tf.config.threading."
            f"set_inter_op_parallelism_threads({num_devices})",
            RuntimeWarning,
            stacklevel=2,
        )
