"""Offers the devices of this machine to a client, with a server of TensorFlow.

    pipemesh worker --port=2222 --cpu_devices=2
    pipemesh train --cluster=127.0.0.1:2222 --mesh_shape=layers:2 --model=...

The server executes whatever a client sends, without authentication or encryption. So by default
only this machine can reach it. --listen names an address of a private network, or of a tunnel, by
which others can.
"""

from __future__ import annotations

from pipemesh.commands import process
from pipemesh.commands.flags import Command, Flag, parse
from pipemesh.hosts.cluster import LOOPBACK, PORT

COMMAND = Command(
    "pipemesh worker",
    __doc__,
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
        # Of a parent that ends its workers with itself.
        Flag("parent_fd", int, hidden=True),
    ),
)


def main(argv: list[str]) -> int:
    """Runs the command; returns its exit code.

    Raises:
        DeviceError: it cannot listen there.
    """
    flags = parse(argv, COMMAND)
    # It loads TensorFlow, which announces itself.
    process.import_quietly()
    from pipemesh.hosts.worker import run_worker

    return run_worker(flags.port, flags.listen, flags.cpu_devices, flags.parent_fd)
