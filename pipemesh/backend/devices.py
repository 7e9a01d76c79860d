"""The devices and threads of a process, set up before TensorFlow starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

# The context is mostly private; TensorFlow's version is pinned to 2.21.
from tensorflow.python.eager import context

from pipemesh.errors import DeviceError


def eager_context() -> context.Context:
    """Returns TensorFlow's eager context of this process and creates it if necessary."""
    current = context.context()
    assert current is not None
    return current


# The job of a process that drives workers, and of a process without workers.
CLIENT = "localhost"


def is_client() -> bool:
    """Returns whether this process drives workers; see `pipemesh.backend.cluster`."""
    definition = eager_context().get_server_def()
    return definition is not None and definition.job_name == CLIENT


MORE_DEVICES = (
    "Use a smaller mesh, or get more CPU devices: call "
    "pipemesh.backend.devices.start_cpu_devices(number) before TensorFlow starts"
)
"""Advice for errors about too few devices."""


def start_cpu_devices(num_devices: int) -> None:
    """Splits this machine's CPU into logical devices that compute at the same time.

    Each operation uses its device's share of the cores. There are at least as many inter-op threads
    as devices: with fewer, stages would wait for each other. GPUs are hidden: TensorFlow would put
    operations without a device there, and keep all of their memory from other programs.

    Args:
        num_devices: at least 1.

    Raises:
        DeviceError: TensorFlow has already started, or `num_devices` is below 1.

    Example:
        >>> start_cpu_devices(0)
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: num_devices is 0; it must be at least 1
    """
    if num_devices < 1:
        raise DeviceError(f"num_devices is {num_devices}; it must be at least 1")
    cores = os.cpu_count() or 1
    try:
        tf.config.set_visible_devices([], "GPU")
        tf.config.set_logical_device_configuration(
            tf.config.list_physical_devices("CPU")[0],
            [tf.config.LogicalDeviceConfiguration()] * num_devices,
        )
        tf.config.threading.set_inter_op_parallelism_threads(max(num_devices, cores))
        tf.config.threading.set_intra_op_parallelism_threads(max(1, cores // num_devices))
    except RuntimeError as error:
        existing = len(tf.config.list_logical_devices("CPU"))
        raise DeviceError(
            f"num_devices is {num_devices}, but TensorFlow has already started with {existing} CPU "
            "devices; set devices up before the first operation"
        ) from error


def prepare_graphs_quickly() -> None:
    """Lets TensorFlow's graph optimizer pass over each graph once instead of twice.

    A second pass finds little in the graphs of a pipeline, and the optimizer takes most of the time
    before a graph runs first. Its conversions to MLIR and back, a fourth of that time, change no
    operation of them. On CPUs the optimizer also leaves memory alone, because the schedule
    fixes the order of computations, and the layout of images, which it would not change. Sessions
    of TF1 have a configuration of their own.

    Raises:
        DeviceError: TensorFlow has already started.

    Example::

        prepare_graphs_quickly()
        start_cpu_devices(2)
    """
    eager = eager_context()
    if eager._initialized:
        raise DeviceError(
            "TensorFlow has already started; set its graph optimizer up before the first operation"
        )
    config = tf.compat.v1.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.meta_optimizer_iterations = rewrites.ONE
    rewrites.disable_tfg_optimizer = True
    if not tf.config.list_physical_devices("GPU"):
        rewrites.memory_optimization = rewrites.NO_MEM_OPT
        rewrites.layout_optimizer = rewrites.OFF
    eager._config = config


def check_devices_exist(devices: Sequence[str]) -> tuple[str, ...]:
    """Returns TensorFlow's names of devices, or raises an error if one is missing."""
    # TensorFlow would silently put the operations of a missing device elsewhere. The devices of a
    # TF1 session are not known here.
    if isinstance(devices, str) or not isinstance(devices, Sequence):
        raise DeviceError(
            f"devices are {devices!r}; give a list of names, for example ['CPU:0', 'CPU:1']"
        )
    specs = [_parse(device) for device in devices]
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return tuple(devices)
    known = [device.name for device in tf.config.list_logical_devices()]
    names: list[str] = []
    for device, spec in zip(devices, specs, strict=True):
        matching = [name for name in known if _fits(spec, tf.DeviceSpec.from_string(name))]
        if not matching:
            raise DeviceError(
                f"device {device!r} does not exist; there are {', '.join(known)}. {MORE_DEVICES}"
            )
        # A name such as `GPU` leaves the choice to TensorFlow.
        names.append(device if spec.device_index is None else matching[0])
    return tuple(names)


def processor_beside(device: str) -> str:
    """Returns the CPU on the same host that does what a device cannot; a CPU is its own."""
    spec = tf.DeviceSpec.from_string(device)
    if spec.device_type == "CPU":
        return device
    return spec.replace(device_type="CPU", device_index=0).to_string()


def _parse(device: object) -> tf.DeviceSpec:
    cause: Exception | None = None
    if isinstance(device, str):
        try:
            return tf.DeviceSpec.from_string(device)
        except ValueError as error:
            cause = error
    raise DeviceError(
        f"{device!r} is not the name of a device; write for example 'CPU:0' or 'GPU:1'"
    ) from cause


def _fits(requested: tf.DeviceSpec, spec: tf.DeviceSpec) -> bool:
    if spec.job is None:
        # Without workers, TensorFlow lists devices without job, replica and task.
        spec = spec.replace(job="localhost", replica=0, task=0)
    elif requested.job is None and is_client():
        # With workers, a name without a job means this process.
        return False
    return agree(requested, spec)


def is_device(pinned: str, device: str) -> bool:
    """Returns whether an operation pinned to `pinned` runs on `device`; an empty pin never does."""
    pin, spec = tf.DeviceSpec.from_string(pinned), tf.DeviceSpec.from_string(device)
    return pin.device_type is not None and agree(pin, spec)


def agree(one: tf.DeviceSpec, other: tf.DeviceSpec) -> bool:
    """Returns whether two names can denote one device: no part that both have differs."""
    parts = ("job", "replica", "task", "device_type", "device_index")
    pairs = [(getattr(one, part), getattr(other, part)) for part in parts]
    return all(a == b or None in (a, b) for a, b in pairs)


def short_name(device: str) -> str:
    """Returns type and number of a device, with the task if the device is a worker's."""
    spec = tf.DeviceSpec.from_string(device)
    alone = not spec.task and spec.job in (None, "localhost")
    task = "" if alone else f"/task:{spec.task or 0}/"
    return f"{task}{spec.device_type}:{spec.device_index or 0}"


def device_of_scope() -> str:
    """Returns the device of the innermost eager `tf.device` scope, '' outside all scopes."""
    return eager_context().device_name or ""


def check_threads(num_devices: int) -> None:
    """Warns if so many devices share too few inter-op threads to compute at one time."""
    # The threads of a TF1 session are unknown here: they are set when the session is made.
    threads = tf.config.threading.get_inter_op_parallelism_threads()
    if tf.compat.v1.executing_eagerly_outside_functions() and 0 < threads < num_devices:
        warnings.warn(
            f"{num_devices} devices share {threads} inter-op threads, so stages wait for each "
            "other; before TensorFlow starts, call tf.config.threading."
            f"set_inter_op_parallelism_threads({num_devices})",
            RuntimeWarning,
            stacklevel=2,
        )
