"""A wrapper that runs `lingvo.trainer` on every system.

    python -m pipemesh.layers.lingvo_trainer --run_locally=cpu --mode=sync --logdir=... --model=...

It takes all flags of the trainer, but does not need glibc 2.38 (`lingvo_loader`). With
`--run_locally=cpu`, a `--worker_split_size` of N gives the worker N CPU devices; lingvo gives one.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import runpy
import sys
from collections.abc import Iterator
from unittest import mock

import tensorflow as tf
from lingvo.core import cluster_factory


def num_cpu_devices(arguments: list[str]) -> int:
    """Returns the number of CPU devices that the worker needs, given the trainer's arguments."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name, kind, default in (("run_locally", str, ""), ("worker_split_size", int, 1)):
        parser.add_argument(f"--{name}", f"-{name}", type=kind, default=default)
    flags, _ = parser.parse_known_args(arguments)
    return max(flags.worker_split_size, 1) if flags.run_locally == "cpu" else 1


@contextlib.contextmanager
def local_cpu_devices(number: int) -> Iterator[None]:
    """Gives lingvo's local server and its workers a number of CPU devices."""
    if number == 1:
        yield
        return
    server = tf.distribute.Server.create_local_server
    config = tf.compat.v1.ConfigProto(device_count={"CPU": number})
    params = cluster_factory.Current().params.Copy()
    for job in (params.controller, params.worker, params.ps, params.evaler, params.decoder):
        # All of them are this process.
        job.cpus_per_replica = number
    for job in (params.evaler, params.decoder):
        # The flag sets the devices of the worker.
        job.devices_per_split = number
    with (
        mock.patch.object(
            tf.distribute.Server, "create_local_server", functools.partial(server, config=config)
        ),
        cluster_factory.Cluster(params),
    ):
        yield


def main() -> None:
    """Runs the trainer with the flags of the command line."""
    with local_cpu_devices(num_cpu_devices(sys.argv[1:])):
        runpy.run_module("lingvo.trainer", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
