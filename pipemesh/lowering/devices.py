"""The devices and threads of a process, set up before TensorFlow starts."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence

import tensorflow as tf

from pipemesh.errors import DeviceError


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


def check_devices_exist(devices: Sequence[str]) -> None:
    """Raises if TensorFlow has no such devices: it would put operations elsewhere, silently.

    Nothing is known of the devices of a TF1 session.

    Args:
        devices: names, whole ones or short ones such as `CPU:1`.

    Raises:
        DeviceError: a device does not exist.

    Example:
        >>> check_devices_exist(["CPU:0", "CPU:99"])
        Traceback (most recent call last):
        pipemesh.errors.DeviceError: device 'CPU:99' does not exist; there are ...
    """
    if not tf.compat.v1.executing_eagerly_outside_functions():
        return
    known = [device.name for device in tf.config.list_logical_devices()]
    specs = [tf.DeviceSpec.from_string(name) for name in known]
    for device in devices:
        wanted = tf.DeviceSpec.from_string(device)
        if not any(_fits(wanted, spec) for spec in specs):
            raise DeviceError(
                f"device {device!r} does not exist; there are {', '.join(known)}. Use a smaller "
                "mesh or set up more logical devices before TensorFlow starts"
            )


def _fits(wanted: tf.DeviceSpec, spec: tf.DeviceSpec) -> bool:
    parts = ("job", "replica", "task", "device_type", "device_index")
    return all(getattr(wanted, part) in (None, getattr(spec, part)) for part in parts)


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
